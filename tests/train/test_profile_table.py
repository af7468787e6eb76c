"""Launches of kernels are summed up by their names."""

from expertflow.train.profile.kernels import N_CHARS, Span, kernel_table


def test_launches_are_summed_by_name() -> None:
    long = "gemm" + "x" * 1_400
    spans = [
        Span(name="flash", start_us=0, end_us=30, self_us=30),
        Span(name=long, start_us=30, end_us=70, self_us=40),
        Span(name=long, start_us=70, end_us=90, self_us=20),
        Span(name="nvjet", start_us=90, end_us=100, self_us=10),
    ]
    table = kernel_table(spans)
    assert [(kernel.n_calls, kernel.total_s) for kernel in table] == [
        (2, 60e-6), (1, 30e-6), (1, 10e-6)
    ]  # fmt: skip
    assert len(table[0].name) == N_CHARS
