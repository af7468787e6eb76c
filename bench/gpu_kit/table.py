"""The kit's result as text."""

from typing import Any

GIB = 1 << 30
# Of what a run activated: which kernels it uses, and how its results compare with plain ones.
CHECKED = ("attention ", "model checked", "route ")
TRAINED = ("lora", "full", "dora", "qlora", "trl", "unsloth")
HEAD = (
    f"{'part':>20} {'tokens/s':>10} {'step ms (5-95 %)':>22}"
    f" {'predicted':>9} {'MFU':>6}"
    f" {'of matmul':>9} {'peak GiB':>8} {'wait':>6} {'first s':>7}  micro-batch"
)


def table(report: dict[str, Any]) -> str:
    """Write everything that was measured, part by part."""
    machine, rows, parts = report["machine"], report["rows"], report["parts"]
    lines = [
        f"{machine['device']}, torch {machine['torch']}, random Qwen3 {report['model']}",
        f"rows of {rows['row_length']} tokens: {rows['lengths']}; mean"
        f" {rows['mean_document_tokens']:.0f} tokens, sum(len^2)/sum(len)"
        f" {rows['sum_len_sq_over_sum_len']:.0f}, {rows['supervised_share']:.0%} supervised,"
        f" {rows['padding_share']:.1%} padding when packed",
        f"FLOPs: {report['convention']}",
        "MFU: by the table's peak; of matmul: by the large product measured here; predicted: ms by"
        " the plan's step model, before anything was measured",
        "",
        *(_ceilings(parts["ceilings"]) if "ceilings" in parts else ()),
        HEAD,
        *(_training(name, part) for name, part in parts.items() if name.split("-")[0] in TRAINED),
        "",
        *(line for name, part in parts.items() for line in _conditions(name, part)),
        *(_check(name, parts[name]) for name in ("resume", "packing") if name in parts),
    ]
    if report["left_out"]:
        lines.append(f"skipped, as the budget was spent: {', '.join(report['left_out'])}")
    return "\n".join(lines)


def _problem(part: dict[str, Any]) -> str | None:
    if "failed" in part:
        return f"FAILED: {part['failed']}"
    if "absent" in part:
        return f"not run: {part['absent']}"
    if "out_of_memory" in part:
        at = part.get("micro_batch_size")
        return f"does not fit{f' at micro-batch {at}' if at else ''}: {part['out_of_memory']}"
    return None


def _ceilings(part: dict[str, Any]) -> list[str]:
    if problem := _problem(part):
        return [f"ceilings: {problem}", ""]
    tera = (f"{k} {v / 1e12:.1f}" for k, v in part["matmul_by_shape"].items())
    peak = part["peak_bf16_flops_per_s"]
    known = f"{peak / 1e12:.1f} ({part['peak_source']})" if peak else part["peak_source"]
    said = (f"{k} {v / 1e9:.1f}" for k, v in part["copy_bytes_per_s"].items() if v is not None)
    return [
        f"products, {part['matmul_dtype']} TFLOP/s: {', '.join(tera)}",
        f"peak of the table, bf16 TFLOP/s: {known}",
        f"copies, GB/s: {', '.join(said)}",
        "",
    ]


def _training(name: str, part: dict[str, Any]) -> str:
    if problem := _problem(part):
        return f"{name:>20} {problem}"
    spread = f"{_ms(part['step_s'])} ({_ms(part['step_low_s'])}-{_ms(part['step_high_s'])})"
    memory, predicted = part["peak_memory_bytes"], part["predicted"]
    halved = f", after {part['out_of_memory_at']}" if part["out_of_memory_at"] else ""
    return (
        f"{name:>20} {part['tokens_per_s']:>10,.0f} {spread:>22}"
        f" {_ms(predicted['total_s']) if predicted else '-':>9}"
        f" {_percent(part['mfu']):>6} {_percent(part['mfu_of_measured_matmul']):>9}"
        f" {'-' if memory is None else f'{memory / GIB:.1f}':>8}"
        f" {_percent(part['data_wait_share']):>6}"
        f" {part['first_step_s']:>7.1f}  {part['micro_batch_size']}{halved}"
        + ("" if part["loss_is_finite"] else "  LOSS NOT FINITE")
    )


def _conditions(name: str, part: dict[str, Any]) -> list[str]:
    """Describe the checks and fallbacks of a part, and how warm and fast the card was."""
    card = part.get("card", {})
    lines = [f"{name}: {f['part']} was replaced by {f['used']}: {f['reason']}"
             for f in part.get("fallbacks", ())]  # fmt: skip
    checked = [word for word in part.get("activated", ()) if word.startswith(CHECKED)]
    lines += [f"{name}: {word}" for word in part.get("words", checked)]
    if clock := card.get("sm_clock_mhz"):
        power, heat = card["power_w"], card["temperature_c"]
        lost = ", ".join(f"{why} {s:.1f} s" for why, s in (card["throttle_s"] or {}).items() if s)
        lines.append(
            f"{name}: SM {clock['mean']:.0f} MHz ({clock['min']:.0f}-{clock['max']:.0f})"
            + (f", {power['mean']:.0f} W of {card['power_limit_w']:.0f}" if power else "")
            + (f", at most {heat['max']:.0f} C" if heat else "")
            + f"; throttled: {lost or 'no'}; {len(card['other_processes'])} other processes"
        )
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _check(name: str, part: dict[str, Any]) -> str:
    if problem := _problem(part):
        return f"{name}: {problem}"
    figures = {k: v[:12] if isinstance(v, str) else v for k, v in part["figures"].items()}
    told = ", ".join(f"{k} {v}" for k, v in figures.items())
    return f"{name}: {'passed' if part['passed'] else 'NOT PASSED'}: {told}"
