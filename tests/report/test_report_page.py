"""report.html: one small file without network or script; its tables, kernels and charts."""

import html
import re

import pandas as pd
import pytest
import report_reading as reading
from made_up_ablation import make_ablation
from made_up_runs import CPU, GPU
from made_up_series import STEP_S, TOKENS_PER_STEP, make_profile
from msgspec.structs import replace

from expertflow.core.format import show_hidden
from expertflow.core.records import from_json
from expertflow.report.ablation_page import render_ablation
from expertflow.report.build import build_report
from expertflow.report.build_run import REFERENCE_BANDS
from expertflow.report.charts import drawing as charts
from expertflow.report.charts.frame import _themed, time_unit
from expertflow.report.measured import restore, to_plain
from expertflow.report.page import render_page
from expertflow.report.profile import kind_of, list_kernels, sum_by_kind
from expertflow.report.records import Report
from expertflow.train.records import Kernel, StepRecord

PLACES = (("evaluation", "time"), ("samples", "findings"), ("timeline", "data"),
          ("plan", "sources"), ("provenance", "footer"))  # fmt: skip


def test_pages_equal_their_golden_texts() -> None:
    """Every text, figure, name of a drawing and reason, in order."""
    pages = {
        "report-gpu": GPU.page,
        "report-cpu": CPU.page,
        "index": reading.index_page(GPU.report, CPU.report),
        "ablation": render_ablation(make_ablation()),
    }
    for name, page in pages.items():
        reading.check_page_is_safe(page)
        assert len(page.encode()) < reading.MAX_PAGE_BYTES / 2
        assert not re.search(">(None|nan|null)<", page)
        drawings = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
        assert not re.findall(r'"#[0-9a-f]{3,6}"', drawings), "colors are those of the theme"
        used, defined = (set(re.findall(x, page)) for x in (r"var\(--(\w+)\)", r"--(\w+):"))
        assert used <= defined
        reading.compare_with_golden(f"{name}.txt", reading.lines_of(page))
    assert "prefers-color-scheme: dark" in GPU.page
    assert "paint-order: stroke" in GPU.page, "or rims cover their letters"


# Schema or templates interpret these texts.
KEPT = {"kind", "level", "learned", "severity", "op", "verdict", "started_at", "preset", "unit",
        "change", "status", "method", "chat_template", "split_source", "origin", "action",
        "merged_into", "class", "confidence", "quantity", "bound"}  # fmt: skip
MAPS = {"n_by_kind", "throttle_s", "temperature_limits_c", "machine", "versions",
        "dropped_by_reason", "rejected_by_reason", "filtered_by_reason"}  # fmt: skip


def _hostile_report(report: Report) -> Report:
    plain, nulls = to_plain(report)
    bill = reading.hostile(plain.pop("bill"), KEPT, set())  # its machine is not a map
    report = from_json(Report, {**reading.hostile(plain, KEPT, MAPS), "bill": bill})
    return restore(report, dict.fromkeys(nulls, reading.HOSTILE))


def _escaped(page: str) -> str:
    reading.check_page_is_safe(page)
    assert "&lt;script&gt;" in page and "<script" not in page
    assert "{{ 7 * 7 }}" in page
    assert "&lt;U+202E&gt; &lt;U+001B&gt;[2J" in page
    assert not {"\u202e", "\x1b"} & set(page)
    return page


def test_hostile_texts_are_escaped() -> None:
    hostile_report = _hostile_report(GPU.report)
    _escaped(render_page(_hostile_report(CPU.report), CPU.short))
    few = {"steps": GPU.inputs.steps[:20], "samples": GPU.inputs.samples[:20]}
    page = _escaped(render_page(hostile_report, replace(GPU.inputs, **few)))
    for name, end in PLACES:  # only in a full report
        part = page.split(f'<section id="{name}"')[1].split(f'id="{end}"')[0]
        assert part.count("&lt;script&gt;") > 3, name
    other = reading.changed(
        GPU.report, {"run.preset": "demo", "data.sources.0.license": reading.HOSTILE}
    )
    _escaped(reading.index_page(hostile_report, other))
    svg = _themed('<svg width="1"><text>a</text></svg>', reading.HOSTILE)
    outline = reading.Outline(svg)
    assert outline.tags == ["svg", "text"]
    assert dict(outline.attributes)["aria-label"] == show_hidden(reading.HOSTILE)


def test_long_texts_and_series_do_not_burst_the_page() -> None:
    evaluation, datasets = GPU.short.evaluation, GPU.short.datasets
    sample = replace(evaluation.samples[0], prompt="<" * 300_000, after="&" * 300_000)
    inputs = replace(
        GPU.short,
        evaluation=replace(evaluation, samples=(sample,) * 50),
        datasets=replace(datasets, sources=datasets.sources[:1] * 3_000),
    )
    page = render_page(build_report(inputs, {}), inputs)
    assert len(page.encode()) < reading.MAX_PAGE_BYTES
    assert "more characters" in page and "more in report.json" in page
    steps, samples = GPU.inputs.steps, GPU.inputs.samples
    inputs = GPU.change(
        steps=tuple(replace(steps[i % 1_800], step=i + 1) for i in range(6_000)),
        samples=tuple(replace(samples[i % 1_000], elapsed_s=float(i)) for i in range(6_000)),
        training={"save_points": GPU.inputs.training.save_points[-1:] * 300},
    )
    page = render_page(GPU.report, inputs)
    assert len(page.encode()) < reading.MAX_PAGE_BYTES
    assert page.count("<figure>") >= 11


def test_parts_without_content_are_left_out() -> None:
    report = reading.changed(GPU.report, {
        "plan.options": [], "plan.claims": [], "plan.memory": None, "provenance.chain": [],
    })  # fmt: skip
    page = render_page(report, GPU.short)
    reading.Outline(page)
    for text in ("The same work", "Claims, checked", "Device memory", "From sources to report"):
        assert text not in page and text in GPU.page
    assert "No readings were taken." in page and "No readings were taken." not in GPU.page


def _rows(page: str, place: str) -> dict[str, str]:
    """Return the rows of the first table in a section of a page by their first cell."""
    table = page.split(place)[1].split("</table>")[0]
    rows = re.findall(r"<tr[^>]*><td>([^<]+?) *<(.*?)</tr>", table, re.DOTALL)
    return {name.strip(): html.unescape(rest) for name, rest in rows}


def test_rows_state_whether_the_band_held_and_omit_missing_readings() -> None:
    place = "training_report.hardware"
    bare = {f"{place}.throttle_s": {"thermal": 0.0}, f"{place}.machine": None,
            f"{place}.collection_interval_effective_seconds": None,
            "training_parameters.world_size": 4, "cost.energy_kwh": 2.0}  # fmt: skip
    dear = {"plan_against_actual.4.actual": 99.0}
    page = render_page(reading.changed(GPU.report, {**bare, **dear}), GPU.short)
    assert "outside the band" in _rows(page, '<section id="plan">')["Cost"]
    machine = _rows(page, "The machine in figures")
    assert "2\u00a0kWh of all visible cards" in machine["Energy"]
    assert "W of all visible cards" in machine["Power"]
    assert "never" in machine["Throttled"]
    assert "processor" not in _rows(page, "What this report was made from")
    assert "2,680 readings, one every 1&nbsp;s as configured." in page
    # A prior covers only the steps.
    prior = GPU.report_with(plan={"cost": replace(GPU.inputs.plan.cost, calibrated=False)})
    page = render_page(prior, GPU.short)
    assert '"note">plan 44\u00a0min</dd>' in page
    assert "its hours are for the steps alone" in reading.index_page(prior)
    rows = _rows(page, '<section id="plan">')
    assert "the band" not in rows["Cost"] and "the band" in rows["Useful tokens per second"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
         "communication"),
        ("void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_Copy>", "matmul"),
        ("triton_tem_fused_mm_12", "matmul"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>", "optimizer"),
        ("void cunn_SoftMaxForward<4, float, LogSoftMaxForwardEpilogue, log_softmax>", "loss"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "elementwise"),
        ("void at::native::elementwise_kernel<direct_copy_kernel_cuda(Iterator&)>", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, BinaryFunctor<...>>", "elementwise"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("aten::as_strided", "other"),
    ],
)  # fmt: skip
def test_kind_of_a_kernel(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_long_names_of_kernels_are_cut() -> None:
    profile = replace(
        make_profile(), kernels=(Kernel(name="gemm" + "x" * 400, n_calls=2, total_s=6.0),)
    )
    kinds = [(kind.kind, kind.n_calls, kind.share_fraction) for kind in sum_by_kind(profile)]
    assert kinds == [("matmul", 2, 1.0)]
    assert len(list_kernels(profile, 1)[0].name) == 300


def test_on_a_cpu_operators_are_listed() -> None:
    inputs = replace(GPU.short, profile=replace(make_profile(), device="cpu"))
    page = render_page(build_report(inputs, {}), inputs)
    for text in ("by self time", "<th>operator</th>", "Longest operators"):
        assert text in page


def test_a_ticks_label_is_the_number_at_its_place() -> None:
    svg = charts.timeline_charts(GPU.inputs, REFERENCE_BANDS)[0].svg
    assert svg in GPU.page, "drawn again, a chart is the same"
    found = re.findall(r"translate\(([\d.]+),15\)\"[^>]*>([\d.]+)(?: min)?<", svg)
    places = [(float(x), float(label)) for x, label in found]
    assert 3 <= len(places) <= 4
    per_min = places[-1][0] / places[-1][1]
    assert all(x == pytest.approx(per_min * label, abs=0.3) for x, label in places)
    assert places[-1][1] <= 45
    # One reading at the very start.
    assert time_unit(0.0) == ("s", 1.0)


def test_cuts_are_counted_not_guessed() -> None:
    labels = {cut.length_tokens: cut.label for cut in charts.judge_lengths(GPU.inputs.packing)}
    assert labels[1536] == "rows of 1,536: cuts 0.5 %"
    assert labels[2048] == "2,048: cuts none"  # longer than the longest document
    packing = replace(GPU.inputs.packing, choices=(), sequence_length_tokens=1_024)
    cuts = [(cut.length_tokens, cut.fraction) for cut in charts.judge_lengths(packing)]
    assert cuts == [(1024, None), (1536, None), (2048, 0.0)]


def test_series_keep_extremes_and_clocks() -> None:
    x = pd.Series(range(10_000))
    points = charts.envelope(x, x % 7, n_bins=100)
    assert len(points) == 100
    assert points["low"].min() == 0 and points["high"].max() == 6
    assert points["y"].between(points["low"], points["high"]).all()
    # Steps between kept lines do not lower the speed.
    rates = charts.tokens_per_s(charts.make_table(StepRecord, GPU.inputs.steps[::10]))["y"]
    assert rates.min() == pytest.approx(TOKENS_PER_STEP / STEP_S, rel=0.06)
    first, second, third, *_ = CPU.inputs.steps
    resumed = charts.make_table(StepRecord, [first, second, replace(third, elapsed_s=1.0)])
    assert charts.durations_s(resumed).iloc[-1] == third.step_s
    # An evaluation before training comes first.
    evaluation = replace(CPU.inputs.training.eval_points[0], step=0)
    ((_, end_s),) = charts.evaluation_spans(CPU.inputs.steps, [evaluation])
    assert end_s == pytest.approx(first.elapsed_s - first.step_s)
