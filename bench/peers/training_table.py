"""Tables of training measured side by side."""

from typing import Any

from training_lines import OURS

# For the features in our log, the peer's own statements.
TOLD = ("attention", "loss", "compilation", "activation checkpointing")
Row = dict[str, Any]


def print_method(method: str, measured: Row) -> None:
    if "problem" in measured:
        print(f"\n{method}: not measured: {measured['problem']}")
        return
    print(f"\n{method}, {measured['settings']['precision']}")
    print(
        f"{'line':>18} {'tokens/s':>9} {'ours/peer':>9} {'spread':>11}"
        f" {'a CPU s':>8} {'ours/peer':>9} {'spread':>11} {'peak MB':>8}"
        f" {'card MB':>8} {'loss apart':>10}"
    )
    for name, row in measured["lines"].items():
        if "problem" in row:
            print(f"{name:>18} not measured: {row['problem']}")
            continue
        card = row["peak_device_bytes"]
        print(
            f"{name:>18} {row['tokens_per_s']['median']:9,.0f} {wide(row.get('ours_over_peer'))}"
            f" {row['tokens_per_cpu_s']['median']:8,.0f} {wide(row.get('ours_over_peer_by_cpu'))}"
            f" {row['peak_host_rss_bytes'] / 1e6:8.0f}"
            f" {or_dash(card and card / 1e6, '.0f'):>8} {or_dash(row.get('loss_apart'), '.1e'):>10}"
        )
        for word in row["words"]:
            if name != OURS or word.startswith(TOLD):
                print(f"{'':>18} {word}")
    if proof := measured.get("proof"):
        apart = f"{or_dash(proof.get('loss_apart'), '.1e')} apart over {proof.get('n_steps')} steps"
        print(f"{'proof in fp32':>18} {proof.get('problem') or apart}")


def or_dash(value: float | None, how: str) -> str:
    """Format a figure, or a dash if there is none."""
    return "-" if value is None else format(value, how)


def wide(ratio: Row | None) -> str:
    if ratio is None:
        return f"{'-':>9} {'-':>11}"
    ends = f"{ratio['least']:.2f}-{ratio['most']:.2f}"
    return f"{ratio['median']:9.2f} {ends:>11}"
