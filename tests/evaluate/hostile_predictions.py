"""Hostile predictions by task, with a record to judge them by.

None is right, so each must be judged wrong. ``{port}`` is a listening loopback socket, ``{canary}``
a file that must not change.
"""

from collections.abc import Callable
from typing import Any

from cheating_programs import TESTS as CHEATED_TESTS
from cheating_programs import cheats

# `bench/hostile.py` also uses larger sizes.
Sized = dict[str, str]

SQL_REFERENCE = "SELECT name FROM item ORDER BY id"
JSON_SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}, '
    '"b": {"type": "array", "uniqueItems": true}, "c": {"$ref": "#"}, "d": {"multipleOf": 0.1}}}'
)
TESTS = "import * as assert from 'assert';\nassert.deepEqual(f(2), 4);\n"


def sql(n: int, canary: str) -> Sized:
    """Return queries; ``n`` scales their sizes."""
    endless = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r) SELECT "
    return {
        "empty": "",
        "attach": f"ATTACH '{canary}.db' AS x",
        "vacuum into": f"VACUUM INTO '{canary}.db'",
        "write file": f"SELECT writefile('{canary}', 'x')",
        "read file": f"SELECT readfile('{canary}')",
        "load extension": f"SELECT load_extension('{canary}')",
        "delete": "WITH x AS (SELECT 1) DELETE FROM item",
        "returning": "UPDATE item SET name = 'x' RETURNING name",
        "temp table": "CREATE TEMP TABLE x AS SELECT 1",
        "pragma as table": "SELECT * FROM pragma_database_list",
        "endless rows": endless + "i FROM r",
        "endless sort": endless + "zeroblob(900000) AS z FROM r ORDER BY z",
        "many blobs": endless + "zeroblob(900000) FROM r",
        "printf": f"SELECT printf('%.*c', {min(n * 30_000, 999_999_999)}, 'x')",
        "replace": "SELECT replace(hex(zeroblob(400000)), '0', 'xxxxxxxxxxxx')",
        "glob": "SELECT replace(hex(zeroblob(200000)), '0', 'a') GLOB '" + "*a" * n + "b'",
        "like": "SELECT hex(zeroblob(90000)) LIKE '" + "%0" * min(n, 20_000) + "1'",
        "parentheses": "SELECT " + "(" * n + "1" + ")" * n,
        "not": "SELECT " + "NOT " * n + "1",
        "concatenation": "SELECT " + "||".join("1" for _ in range(n)),
        "union": " UNION ALL ".join("SELECT 1" for _ in range(n // 4)),
        "columns": "SELECT " + ",".join("1" for _ in range(n)),
        "json": "SELECT json('" + "[" * n + "')",
        "json path": "SELECT json_extract('{}', '$" + ".a" * n + "')",
        "quotes": "'" * (2 * n + 1),
        "brackets": "[" * n,
        "comment": "/*" * n,
        "surrogate": "SELECT '\ud800'",
        "unknown table function": "SELECT * FROM generate_series(1, 1e12)",
    }


def json(n: int, canary: str) -> Sized:
    unequal = ",".join(f'{{"k":{k}}}' for k in range(n // 4))
    return {
        "empty": "",
        "unequal items": '{"b": [' + unequal + ', 1, "x"]}',
        "deep objects": '{"c":' * n + "1" + "}" * n,
        "deep in its schema": '{"c":' * 60 + "{}" + "}" * 60,
        "long number": '{"d": ' + "9" * n + "}",
        "no multiple": '{"d": 1e308}',
        "nul": '{"a": "\0"}',
        "long": '{"a": "' + "a" * 50 * n + '"}',
        "fences": "```\n" * n,
        "remote": '{"$ref": "http://127.0.0.1:{port}/x", "a": 1}',
        "file": '{"$ref": "file://' + canary + '", "a": 1}',
    }


def cypher(n: int, canary: str) -> Sized:
    return {
        "empty": "",
        "load": f"LOAD CSV FROM 'file://{canary}' AS x RETURN x",
        "load from the network": "LOAD CSV FROM 'http://127.0.0.1:{port}/x' AS x RETURN x",
        "call": "CALL dbms.shutdown()",
        "parentheses": "RETURN " + "(" * n,
        "lists": "RETURN " + "[" * n + "]" * n,
        "maps": "RETURN " + "{a:" * n,
        "not": "MATCH (a) WHERE " + "NOT " * n + "a.x RETURN a",
        "or": "MATCH (a) WHERE a.x = 1" + " OR a.x = 1" * n + " RETURN a",
        "case": "RETURN " + "CASE WHEN 1 THEN " * n,
        "deep but short": "RETURN " + "(" * 900 + "1" + ")" * 900,
        "subqueries": "CALL { " * min(n, 2500),
        "quotes": "'" * (2 * n + 1),
        "comment": "/*" * n,
        "long": "x" * 50 * n,
    }


def typescript(n: int, canary: str) -> Sized:
    return {
        "empty": "",
        "parentheses": "(" * n,
        "generics": "a<" * n,
        "generic calls": "a<b>(" * n,
        "arrows": "(a)=>" * n,
        "templates": "`${" * n,
        "tags": "<a>" * n,
        "types": "type A=" + "T extends U ? " * n,
        "quotes": "'" * (2 * n + 1),
        "comment": "/*" * n,
        "long": "a+" * 25 * n + "a",
        "reads a file": f"require('fs').readFileSync('{canary}')",
    }


def typescript_tests(n: int, canary: str) -> Sized:
    """Return programs that are not in cheats.ts or the sandbox's tests."""
    f = "const f = (n: number): number => 0;\n"
    fs, c = "import * as fs from 'fs';\n", "import * as c from 'child_process';\n"
    deaf = "process.on('SIGTERM', () => 0); process.on('SIGXCPU', () => 0);"
    dial = "await new Promise((_, no) => net.connect({port}, '127.0.0.1').on('error', no));\n"
    run = "for (;;) new w.Worker('for(;;){}', {eval: true});"
    return {
        "aborts": "process.abort()",
        "opens a block": f + "if (false) {",
        "never settles": "await new Promise(() => undefined);\n" + f,
        "ignores signals": deaf + "for (;;) {}\n" + f,
        "backtracks": "/^(a+)+$/.test('a'.repeat(50) + '!');\n" + f,
        "recurses": "const g = (): number => g() + 1; g();\n" + f,
        "reads a file": fs + f"fs.readFileSync('{canary}');\n" + f,
        "writes a file": fs + f"fs.writeFileSync('{canary}', 'x');\n" + f,
        "removes files": fs + "fs.rmSync('/', {recursive: true});\n" + f,
        "starts a process": c + "c.execSync('id');\n" + f,
        "starts itself": c + "for (;;) c.spawn(process.execPath);",
        "starts a thread": "import * as w from 'worker_threads';\n" + run,
        "kills all": "process.kill(-1, 'SIGKILL');\n" + f,
        "kills its parent": "process.kill(process.ppid, 'SIGKILL');\n" + f,
        "connects": "import * as net from 'net';\n" + dial + f,
        "fetches": "await fetch('http://127.0.0.1:{port}/');\n" + f,
        "listens": "import * as net from 'net';\nnet.createServer().listen(0);\n" + f,
        "reads the environment": "throw new Error(JSON.stringify(process.env));",
        "loads native code": "process.dlopen({exports: {}}, '/lib/x.node');\n" + f,
        "inspects": "import * as i from 'inspector';\nnew i.Session().connect();\n" + f,
        "binds": "(process as any).binding('spawn_sync');\n" + f,
        "becomes root": "process.setuid!(0);\n" + f,
        "gathers": "import x from 'https://127.0.0.1:{port}/x.js';\n" + f,
        "throws a trap": "throw new Proxy({}, {get() { for (;;) {} }});",
        "throws nothing": "throw undefined;",
        "parentheses": "(" * n,
        "surrogate": f + "'\ud800'",
        "long": f + "a+" * 25 * n,
    }


def text(n: int, canary: str) -> Sized:
    return {
        "empty": "",
        "commas": "#### " + "1," * 25 * n,
        "exponent": "#### 1e999999999",
        "not a number": "#### NaN",
        "other digits": "#### ٤",
        "fences": "```\n" * 10 * n,
        "surrogate": "#### \ud800",
        "nul": "\0" * n,
    }


def cheating(tests: str) -> Callable[[int, str], Sized]:
    return lambda n, canary: cheats(tests)


def records(database: str) -> dict[str, dict[str, Any]]:
    tested = {"task": "typescript_tests", "reference": "", "fields": {"tests": "t"}}
    cheated = {
        f"typescript_tests, {name}": {**tested, "record": {"t": tests}}
        for name, tests in CHEATED_TESTS.items()
    }
    schema = {"fields": {"schema": "s"}, "record": {"s": JSON_SCHEMA}}
    return cheated | {
        "sql_execution": {"reference": SQL_REFERENCE, "artifacts": {"database": database}},
        "json_schema": {"reference": '{"a": "aa"}', **schema},
        "cypher": {"reference": "MATCH (a:P) RETURN a.name"},
        "typescript": {"reference": "f(1)"},
        "typescript_tests": {**tested, "record": {"t": TESTS}},
        "final_answer": {"reference": "#### 4"},
        "exact_match": {"reference": "4"},
    }


PREDICTIONS = {
    "sql_execution": sql, "json_schema": json, "cypher": cypher, "typescript": typescript,
    "typescript_tests": typescript_tests,
    "final_answer": text, "exact_match": text,
    **{f"typescript_tests, {name}": cheating(name) for name in CHEATED_TESTS},
}  # fmt: skip
