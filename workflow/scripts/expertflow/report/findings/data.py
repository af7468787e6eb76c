"""Findings on the data: what it may be used for, what was lost, and how it fills the rows."""

from expertflow.report.findings.evidence import Findings, make_finding
from expertflow.report.format import number_of, percent
from expertflow.report.records import Report

MIN_RECORDS = 30  # per source: a share of fewer says little
LEFT_OUT_LIMIT = 1 / 3
# Documents that the manifest itself leaves out: not a fault of the data.
CHOSEN = ("over_source_cap", "over_category_cap", "below_weight", "over_max_documents")
PADDING_LIMIT, CUT_LIMIT = 0.10, 0.05
MANY_ROWS = 10  # with fewer, the last one's unused part is a notable share
ACCUMULATION = "gradient_accumulation_steps"
MIN_GOOD_STEPS, WARMUP_LIMIT = 50, 0.20


def find_missing_license(report: Report) -> Findings:
    names = [source.name for source in report.data.sources if not source.license]
    if names:
        yield make_finding(
            "no-license",
            evidence=f"no license is stated for {', '.join(names)}",
            threshold="a license for each source",
            origin="the model inherits the obligations of its data",
            recommendation="state the license in the manifest, or leave the source out",
        )


def find_left_out_records(report: Report) -> Findings:
    """Find sources with many records rejected, filtered or duplicated.

    What caps and weights removed is known only for all sources together, so a source's share is at
    least what remains if all of it is attributed to that source.
    """
    dropped, shares = report.data.dropped_by_reason, []
    n_chosen = sum(dropped.get(reason, 0) for reason in CHOSEN)
    for source in report.data.sources:
        # Each record was either left out or kept on one side of the split.
        total = source.n_left_out + source.n_train + source.n_held_out
        # Everything that caps and weights removed is deducted from each source: a lower bound.
        n_lost = source.n_left_out - n_chosen
        if total >= MIN_RECORDS and n_lost > LEFT_OUT_LIMIT * total:
            shares.append(f"{percent(n_lost / total)} of {source.name}")
    if shares:
        yield make_finding(
            "data-left-out",
            evidence=f"at least {', '.join(shares)} was rejected, filtered or dropped, not counting"
            " caps and weights",
            threshold=f"at most {percent(LEFT_OUT_LIMIT)} of a source",
            recommendation="check the reasons in data.rejected_by_reason, filtered_by_reason and"
            " dropped_by_reason; many near duplicates may be one template with different values",
        )


def find_cut_tokens(report: Report) -> Findings:
    data, share = report.data, report.data.truncated_fraction
    if share and share > CUT_LIMIT:
        # Otherwise only rows without targets are left out.
        is_cut = data.overflow in ("truncate", "drop")
        split = "set overflow: split to train on all pieces, or " if is_cut else ""
        yield make_finding(
            "tokens-cut",
            evidence=f"{percent(share)} of the tokens were not trained on, because their documents"
            f" exceed a row of {data.seq_len:,} (overflow: {data.overflow}), or have no targets",
            threshold=f"at most {percent(CUT_LIMIT)}",
            recommendation=f"{split}raise max_seq_length, up to {data.length_histogram.max:,} for"
            " the longest document",
        )


def find_padding(report: Report) -> Findings:
    data, share = report.data, report.data.padding_fraction
    if share and share > PADDING_LIMIT:
        advice = "pack several documents into a row (packing: bfd)"
        if data.packing != "none":
            documents = number_of(data.documents_train, "document")
            rows = number_of(data.sequences, "row")
            advice = (
                f"{documents} cannot fill {rows} better: use more data, or lower max_seq_length"
            )
        # With many rows, the last one's unused part does not explain it: the lengths do not fit.
        if data.packing != "none" and data.sequences >= MANY_ROWS:
            advice = (
                f"change max_seq_length: documents of {data.length_histogram.p50:,} tokens"
                f" (median) leave part of each row of {data.seq_len:,} empty"
            )
        yield make_finding(
            "padding",
            evidence=f"{percent(share)} of the token positions in training were padding",
            threshold=f"at most {percent(PADDING_LIMIT)}",
            recommendation=advice,
            worth="how much it slowed the steps was not measured",
        )


def find_few_steps(report: Report) -> Findings:
    parameters = report.training_parameters
    n_steps, n_warmup = parameters.total_steps, parameters.warmup_steps
    advice = "lower training.warmup_ratio"
    if n_steps < MIN_GOOD_STEPS:
        # Whichever can still be reduced.
        fewer = "batch_size" if parameters.gradient_accumulation_steps == 1 else ACCUMULATION
        advice = f"use fewer rows per step ({fewer}), or more epochs"
    if n_steps < MIN_GOOD_STEPS or n_warmup >= WARMUP_LIMIT * n_steps:
        yield make_finding(
            "few-steps",
            severity="info",
            evidence=f"{n_steps:,} steps, {n_warmup:,} of them warmup",
            threshold=f"at least {MIN_GOOD_STEPS} steps, warmup below {percent(WARMUP_LIMIT)}",
            recommendation=advice,
        )


def find_small_data(report: Report) -> Findings:
    n_rows, n_wanted = report.data.sequences, report.training_parameters.global_batch_sequences
    if n_rows < n_wanted:
        yield make_finding(
            "data-below-batch",
            severity="info",
            evidence=f"a step should see {n_wanted:,} rows, but training has only"
            f" {number_of(n_rows, 'row')}: every step sees all of the data",
            threshold="at least one step's rows",
            origin="definition of a batch",
            recommendation=f"use more data, or fewer rows per step (batch_size, {ACCUMULATION})",
        )
