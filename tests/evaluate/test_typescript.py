"""Syntax trees: allowed and forbidden differences, and parse errors."""

import pytest

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.tasks.typescript import TypeScript, syntax

judge_typescript = TypeScript.judge_texts

FUNCTION = "export const add = (a: number, b = 'x'): string => { return a + b; };"


SAME = [
    (FUNCTION, FUNCTION.replace("'", '"').replace(";", "")),
    (FUNCTION, FUNCTION.replace("{", "{\n  // why\n ").replace("=>", "/* x */ =>")),
    ("let a = 'it\\'s'", 'let a = "it\'s"'),
    ("f(a, b)", "f(a, b,)"),
    ("[1, 2]", "[1, 2,];"),
    ("let x = {a, b}", "let x = {a, b,}"),
    ("import {A} from 'a'", "import {A,} from 'a';"),
    ("type T = {a: string; b: number}", "type T = {\n a: string,\n b: number,\n}"),
    ("interface I { a: string; f(): void }", "interface I {\n a: string\n f(): void\n}"),
    ("class C { a = 1; b() {}; }", "class C {\n a = 1\n b() {}\n}"),
    ("function f() { return 1;; }", "function f() { return 1 }"),
    ("switch (a) { case 1: f();; }", "switch (a) { case 1: f() }"),
    ("type P = [A, B]", "type P = [A, B,]"),
    ("let a = <B c='d' />;", 'let a = <B c="d" />'),
    ("let a = <B>c;", "let a = <B>c"),
    (f"Sure:\n```ts\n{FUNCTION}\n```\nDone.", FUNCTION),
]
DIFFERENT = [
    ("let a = 1", "const a = 1"), ("let a = 'b'", "let a = b"), ("let a = 'b'", "let a = `b`"),
    ("let a = 'b '", "let a = 'b'"), ("let a = `b  c`", "let a = `b c`"),
    (r"let a = '\\'", r"let a = '\''"), ("let a = [1,,]", "let a = [1,]"),
    ("let a = [,]", "let a = []"), ("function f() { return x }", "function f() {\n return\n x }"),
    ("if (a) b()", "if (a); b()"), ("f(a)", "f\n;(a)"), ("let a = 1, b", "let a = 1; b"),
]  # fmt: skip
NO_PROGRAM = (
    *("let = =", "function f( {", "", "  \n", "let a = 'x", "f(" * 50_000, "a" * 300_000),
    *("let a\0 = 1", "let a\ud800 = 1", "@@@@", "\x00" * 9, "<<<>>>"),
)


def test_programs_are_the_same_up_to_layout() -> None:
    for kind, pairs in (("correct", SAME), ("different", DIFFERENT)):
        judged = {pair: judge_typescript(pair[0], reference=pair[1]).kind for pair in pairs}
        assert judged == dict.fromkeys(pairs, kind)
    kinds = {judge_typescript(code, reference="a").kind for code in NO_PROGRAM}
    assert kinds == {"did_not_parse"}


def test_deep_nesting_does_not_exhaust_the_stack() -> None:
    deep = "1+" * 40_000 + "1"
    assert judge_typescript(deep, reference=deep + ";").correct
    blocks = "{" * 20_000 + "}" * 20_000
    assert judge_typescript(blocks, reference="a").kind == "different"


def test_the_parts_of_a_loop_are_distinguished() -> None:
    heads = [";;", "a;;", ";a;", ";;a", "a;a;", "a;;a", ";a;a", "a;a;a", "let a;;", "let a;a;"]
    trees = [syntax(f"for ({head}) {{}}") for head in heads]
    assert None not in trees
    assert all(trees.index(tree) == index for index, tree in enumerate(trees))


def test_prefix_makes_a_completion_a_program() -> None:
    prefix = "function f(a: number) {\n  return "
    assert judge_typescript("a + 1\n}", reference="a+1; }", prefix=prefix).correct
    assert judge_typescript("a + 2\n}", reference="a+1; }", prefix=prefix).kind == "different"
    assert judge_typescript(" ", reference="a+1; }", prefix=prefix).kind == "did_not_parse"
    with pytest.raises(EvaluationError, match=r"evaluation\.fields\.prefix"):
        judge_typescript("a + 1\n}", reference="a+1; }")
