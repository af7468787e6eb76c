"""What each task may read from a record, apart from the scorers, whose parsers load slowly."""

FIELDS: dict[str, frozenset[str]] = {
    "held_out_loss": frozenset(),
    "sql_execution": frozenset({"database"}),
    "json_schema": frozenset({"schema"}),
    "cypher": frozenset({"schema"}),
    "typescript": frozenset({"prefix"}),
    "typescript_tests": frozenset({"prefix", "tests"}),
    "multiple_choice": frozenset({"choices", "answer"}),
    "final_answer": frozenset(),
    "exact_match": frozenset(),
}
