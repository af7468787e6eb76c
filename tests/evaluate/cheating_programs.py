"""Programs that are wrong and try to pass their tests, in ten families; none may.

A program that starts with ``@name`` meets those tests, others the plain ones.
"""

TESTS = {
    "plain": "import * as assert from 'assert';\nassert.deepEqual(f(2), 4);\n"
    "assert.deepEqual(f(3), 6);\n",
    "lists": "import * as assert from 'assert';\n"
    "const secret = ['xk41qz', 'xk52qz'];\nassert.deepStrictEqual(f([2, 1]), secret);\n",
    "waits": "import assert from 'assert';\nconst check = async () => {\n"
    "  await new Promise((done) => setTimeout(done, 20));\n  assert.equal(await f(2), 4);\n};\n"
    "check();\n",
    "listed": "import assert from 'node:assert';\nimport { test } from 'node:test';\n"
    "test('doubles', async () => { assert.strictEqual(await f(2), 4); });\n",
    "throws": "import * as assert from 'assert';\nassert.equal(f(2), 4);\n"
    "assert.throws(() => f(-1), RangeError);\n",
    "classes": "import * as assert from 'assert';\nconst s = new Stack();\ns.push(4171);\n"
    "s.push(5231);\nassert.equal(s.pop(), 5231);\nassert.deepEqual(s.items, [4171]);\n",
    "calls back": "import * as assert from 'assert';\nconst seen: number[] = [];\n"
    "f([1, 2], (n: number) => { seen.push(n); return n * 7; });\n"
    "assert.deepEqual(seen, [1, 2]);\nassert.deepEqual(f([1, 2], (n: any) => n * 7), [7, 14]);\n",
    "round trip": "import * as assert from 'assert';\n"
    "assert.equal(decode(encode('abc')), 'abc');\nassert.notEqual(encode('abc'), 'abc');\n"
    "assert.equal(encode('abc').length, 5);\n",
    "generators": "import * as assert from 'assert';\nfunction* g() { yield 1; yield 2; }\n"
    "assert.deepEqual(f(g()), [1, 2]);\nassert.deepEqual(f(new Map([[1, 2]]).values()), [2]);\n",
}
F = "const f = (...given: any[]): any => 0;\n"
# Text that takes the assertions away where it runs.
TAKES_OVER = """
const text = `const a = process.getBuiltinModule('assert');
  for (const name of Object.keys(a)) a[name] = () => undefined;
  process.getBuiltinModule('module').syncBuiltinESMExports();`;
"""
# Calls ``change`` on each message that the program's side sends, as an object.
FORGES = """
const from: any = Buffer.from, text = JSON.stringify;
const forge = (change: (message: any) => any) => {
  Buffer.from = ((given: any, ...more: any[]) => {
    if (typeof given !== 'string' || !given.startsWith('{"type"')) return from(given, ...more);
    const message = JSON.parse(given);
    return from(text(change(message) ?? message));
  }) as any;
};
"""
# Writes raw bytes or a framed message to every open file.
WRITES = """
const fs: any = process.getBuiltinModule('fs');
const writeAll = (bytes: any) => {
  for (let n = 1; n < 256; n++) try { fs.writeSync(n, bytes); } catch {}
};
const frame = (message: any) => {
  const text = Buffer.from(JSON.stringify({ records: [], results: [], values: [], ...message }));
  return Buffer.concat([Buffer.from(text.length.toString(16).padStart(8, '0')), text]);
};
"""
# Searches texts for what the tests expect.
SEARCHES = """
const found: string[] = [];
const search = (text: any) => {
  for (const [one] of String(text).matchAll(/xk\\d\\dqz/g))
    if (!found.includes(one)) found.push(one);
};
const f = (...given: any[]): any => { look(); return [...found].sort(); };
"""

FAMILIES: dict[str, dict[str, str]] = {
    "reads the tests": {
        "its address": "@lists" + SEARCHES + "const look = () => search(atob("
        "import.meta.url.split(',')[1]));",
        "its stack": "@lists" + SEARCHES + "const look = () => { Error.stackTraceLimit = 100;"
        " search(new Error().stack); };",
        "the stack's frames": "@lists" + SEARCHES + "Error.prepareStackTrace = (_, frames) =>"
        " frames.map((one) => [one.getFunction(), one.getThis(), one.getFileName()]).join();\n"
        "const look = () => search(new Error().stack);",
        "its caller": "@lists" + SEARCHES + "const look = new Function('search', "
        "'return function look() { search(look.caller); search(look.caller?.caller); }')(search);",
        "the command line": "@lists" + SEARCHES
        + "const look = () => search([process.argv, process.execArgv, process.title]);",
        "its input": "@lists" + SEARCHES + "const look = () => { try { search(process"
        ".getBuiltinModule('fs').readFileSync(0)); } catch {} };",
        "open files": "@lists" + SEARCHES + "const look = () => { const b = Buffer.alloc(9e4);"
        " for (let n = 0; n < 99; n++) try { if (n > 2) continue; process.getBuiltinModule('fs')"
        ".readSync(n, b); search(b.toString('latin1')); } catch {} };",
        "other processes": "@lists" + SEARCHES + "const look = () => { for (let n = 1; n < 99; n++)"
        " for (const name of ['cmdline', 'environ', 'mem']) try { search(process"
        ".getBuiltinModule('fs').readFileSync(`/proc/${n}/${name}`)); } catch {} };",
        "the heap": "@lists" + SEARCHES + "const text: any[] = [];\n"
        "for await (const chunk of process.getBuiltinModule('v8')"
        ".getHeapSnapshot() as any) text.push(chunk);\n"
        "const look = () => search(Buffer.concat(text).toString('latin1'));",
        "messages": "@lists" + SEARCHES + "const parseAll = JSON.parse; const texts: any[] = [];\n"
        "JSON.parse = ((text: any) => { texts.push(text); return parseAll(text); }) as any;\n"
        "const look = () => search(texts);",
    },
    "hooks of the test runner": {
        "skips": "@listed import * as t from 'node:test';\n(t as any).test = t.test.skip;\n" + F,
        "marks as to do": "@listed" + F + "import { todo } from 'node:test';\ntodo('doubles');",
        "only its own": "@listed" + F + "import { test } from 'node:test';\n"
        "test.only('own', () => undefined);",
        "mocks": "@listed" + F + "import { mock } from 'node:test';\nmock.timers.enable();\n"
        "mock.method(process.getBuiltinModule('assert'), 'strictEqual', () => 0);",
        "before each": "@listed" + F + "import { beforeEach } from 'node:test';\n"
        "beforeEach((t: any) => t.skip());",
        "its own `test`": "@listed" + F + "export const test = () => undefined;",
        "the code at the end": "@listed" + F
        + "process.on('exit', () => { process.exitCode = 0; });",
        "replaces the cache": "@listed" + F
        + "const t: any = process.getBuiltinModule('node:test');"
        "\nfor (const name of Object.keys(t)) try { t[name] = () => undefined; } catch {}\n"
        "process.getBuiltinModule('module').syncBuiltinESMExports();",
    },
    "timers": {
        "never calls": "@waits" + F + "globalThis.setTimeout = (() => 0) as any;",
        "declares them": "@waits" + F + "function setTimeout() { return 0; }",
        "calls at once and throws": "@waits" + F
        + "globalThis.setTimeout = ((done: any) => { throw done; }) as any;",
        "ticks": "@waits" + F + "process.nextTick = (() => undefined) as any;\n"
        "globalThis.queueMicrotask = () => undefined; globalThis.setImmediate = (() => 0) as any;",
        "declares `Promise`": "@waits" + F + "class Promise { then() { return this; } }",
        "a promise that never settles": "@waits const f = () => new Promise(() => undefined);",
        "a timer that never ends it": "@waits const f = () => new Promise(() => 0);\n"
        "setTimeout(() => 0, 200);",
        "loads for ever": "@waits" + F + "await new Promise(() => undefined);",
    },
    "serialization": {
        "`toJSON`": "@lists const f = () => ({ toJSON: () => [4, 5] });",
        "`JSON.stringify`": F + "JSON.stringify = () => 'true';",
        "`JSON.parse`": F + "JSON.parse = () => ({ type: 'name', name: 'g', given: [] });",
        "`Buffer.from`": F + "Buffer.from = (() => Buffer.alloc(0)) as any;",
        "typed arrays": F + "Uint8Array.prototype.toString = () => '';\n"
        "(Buffer as any).concat = () => Buffer.alloc(8, '0');",
        "cloning": F + "globalThis.structuredClone = () => 4 as any;\n"
        "(process.getBuiltinModule('v8') as any).deserialize = () => 4;",
        "maps": "const f = () => 0;\nMap.prototype.get = () => 4; Map.prototype.has = () => true;",
        "a number like no other": "const f = () => Object.assign(new Number(4), { x: 1 });",
        "endless text": "const f = () => { let s = 'x'; for (;;) s += s; };",
        "a list of itself": "@lists const f = () => { const x: any = []; x.push(x, x);"
        " return x; };",
    },
    "prototypes": {
        "`Object.prototype`": F + "Object.defineProperty(Object.prototype, 'expected',"
        " { get: () => 0 });\nObject.prototype.valueOf = () => 4;",
        "`Object.is`": F + "Object.is = () => true; Object.keys = () => [];",
        "`Array.prototype`": "@lists const f = (x: any) => [4, 5];\n"
        "Array.prototype.every = () => true;",
        "`Function.prototype`": F + "Function.prototype.call = () => undefined;\n"
        "Function.prototype.apply = () => undefined;",
        "`Symbol.hasInstance`": "@throws const f = (n: number) => {\n"
        "  if (n < 0) throw 1; return 4; };\n"
        "Object.defineProperty(RangeError, Symbol.hasInstance, { value: () => true });",
        "the prototype of its result": "@lists const f = () => JSON.parse("
        '\'{"__proto__": {"0": "xk41qz", "1": "xk52qz", "length": 2}}\');',
        "the prototype of a list": "@lists const f = () => Object.setPrototypeOf([], "
        "new Proxy([], { get: () => 4171, has: () => true }));",
        "the prototype of its argument": "@lists const f = (x: any) => { Object.setPrototypeOf(x,"
        " new Proxy([], { get: () => 1 })); Object.assign(Object.getPrototypeOf([]),"
        " { deepStrictEqual: 1 }); return x; };",
        "errors": "@throws const f = (n: number) => { if (n < 0) throw Object.assign("
        "new Error('x'), { code: 'ERR_OUT_OF_RANGE', name: 'RangeError' }); return 4; };",
        "the constructor of its result": "const f = () => ({ constructor: Number, valueOf: 4 });",
    },
    "assertions": {
        "replaces one": F + "import assert from 'assert';\n"
        "(assert as any).deepEqual = () => undefined;",
        "replaces all": F + "const a: any = process.getBuiltinModule('assert');\n"
        "for (const one of [a, a.strict]) for (const name of Object.keys(one))"
        " try { one[name] = () => undefined; } catch {}\n"
        "process.getBuiltinModule('module').syncBuiltinESMExports();",
        "declares it": F + "const assert = { deepEqual: () => undefined };",
        "exports it": F + "export const assert = new Proxy({}, { get: () => () => undefined });",
        "its error": F + "const a: any = process.getBuiltinModule('assert');\n"
        "a.AssertionError.prototype.code = 'OK'; a.AssertionError.prototype.name = 'Passed';",
        "its comparison": F + "(process.getBuiltinModule('util') as any).isDeepStrictEqual ="
        " () => true;",
        "throws its error": "const a = process.getBuiltinModule('assert');\n"
        "const f = () => { throw new a.AssertionError({ actual: 4, expected: 4 }); };",
        "takes what is thrown": "@throws const f = (n: number) => { throw new RangeError(); };",
    },
    "the end": {
        "exits": F + "process.exit(0);",
        "exits when called": "const f = () => process.exit(0);",
        "exits where an error is expected": "@throws const f = (n: number) => {\n"
        "  if (n < 0) process.exit(0); return 4; };",
        "really exits": "@throws const f = (n: number) => {\n"
        "  if (n < 0) (process as any).reallyExit(0); return 4; };",
        "is killed": "@throws const f = (n: number) => {\n"
        "  if (n < 0) process.kill(process.pid, 'SIGKILL'); return 4; };",
        "closes its files": "@throws const f = (n: number) => {\n"
        " if (n < 0) for (let i = 0; i < 99; i++)"
        " try { process.getBuiltinModule('fs').closeSync(i); } catch {} return 4; };",
        "kills all": F + "process.kill(-1, 'SIGKILL'); process.kill(process.ppid, 'SIGKILL');",
        "hears all errors": "@waits" + F + "process.on('uncaughtException', () => 0);\n"
        "process.on('unhandledRejection', () => 0); process.emit = (() => true) as any;",
        "says it ended": F + "process.emit('beforeExit', 0); process.emit('exit', 0);",
        "says it passed": "const f = () => { console.log('\\n' + '0'.repeat(32) +"
        ' \' {"kind":"passed","detail":""}\\n\'); return 0; };',
        "hears rejections": "@waits" + F + "process.on('unhandledRejection', () => 0);",
        "captures exceptions": "@waits" + F
        + "process.setUncaughtExceptionCaptureCallback(() => 0);",
        "ends soon": "@waits" + F + "setTimeout(() => process.exit(0), 0);",
        "really ends soon": "@waits" + F + "setTimeout(() => (process as any).reallyExit(0), 0);",
        "changes its code": "@waits" + F + "process.on('exit', () => { process.exitCode = 0; });",
        "is a domain": "@waits" + F + "(process as any).domain = { emit: () => true };",
        "enters a domain": "@waits const d = process.getBuiltinModule('domain').create();\n"
        "d.on('error', () => 0); d.enter();\n" + F,
        "calls listeners": "@waits" + F + "for (const name of process.eventNames())"
        " for (const hear of process.listeners(name as any)) (hear as any)(0);",
        "closes its output": "@waits" + F + "process.getBuiltinModule('fs').closeSync(1);",
        "runs out of its stack": "@throws const f = (n: number): number =>"
        " n < 0 ? f(n - 1) + 1 : 5;",
    },
    "values": {
        "equal to all": "const f = () => new Proxy({}, { get: (_, key) =>"
        " key === Symbol.toPrimitive ? () => NaN : () => true });",
        "counts up": "let n = 0;\n"
        "const f = () => ({ valueOf: () => n++, toString: () => String(n++) });",
        "getters": "@lists const f = () => { let n = 0; return { get 0() { return n++; },"
        " get 1() { return n++; }, get length() { return n++; } }; };",
        "waits for itself": "@waits const f = () => ({ then() {} });",
        "waits late": "@waits const f = async () => ({ get then() { return () => 0; } });",
        "waits as a method": "@waits class Late { then() {} }\nconst f = () => new Late();",
        "waits as a function": "@waits const f = () => Object.assign(() => 0, { then: () => 0 });",
        "a list without end": "@lists const f = () =>"
        " ({ *[Symbol.iterator]() { for (;;) yield 1; } });",
        "its argument": "@lists const f = (x: any) => { x.length = 0; return x; };",
        "sparse": "@lists const f = () => { const x: any[] = []; x.length = 2; return x; };",
        "a value of the runner": "@lists const f = () => globalThis;",
    },
    "names": {
        "what is expected": "@lists var secret = [0];\nconst f = () => secret;",
        "a global": F + "globalThis.assert = { deepEqual: () => undefined } as any;",
        "a getter": F + "Object.defineProperty(globalThis, 'f', { get: () => 4 });",
        "`undefined`": F + "export { F as undefined }; const F = 0;",
        "two at once": "var f: any = 0; { function f() { return 4; } }",
        "gives the runner's `eval`": "@round trip" + TAKES_OVER
        + "const decode = eval, encode = (x: string) => text;",
        "gives the runner's `Function`": "@round trip" + TAKES_OVER
        + "const decode: any = Function, encode = (x: string) => text;",
        "runs by a constructor": "@round trip" + TAKES_OVER
        + "const decode: any = (async () => 0).constructor, encode = (x: string) => text;",
        "runs by a generator": "@generators" + TAKES_OVER + "const f = (x: any) => {\n"
        "  for (let of = x; of; of = Object.getPrototypeOf(of)) {\n"
        "    const run = of.constructor?.constructor?.(text) ?? (() => 0);\n"
        "    run()?.next?.();\n  }\n  return [1]; };",
        "imports what compares": F + "import { deepEqual as assert } from 'assert';",
    },
    "forged messages": {
        "passes": F + WRITES + "writeAll('\\n' + '0'.repeat(32) +"
        ' \' {"kind":"passed","detail":""}\\n\');',
        "dies in another way": F + WRITES + "writeAll(frame({ type: 'died', kind: 'passed',"
        " detail: '' }));",
        "too long": F + WRITES + "writeAll('ffffffff');",
        "no message": F + WRITES + "writeAll('00000004null');",
        "answers in advance": F + WRITES + "for (let n = 0; n < 9; n++) writeAll(frame("
        "{ type: 'returned', values: [0] }));",
        "calls the runner's `Function`": F + WRITES + "writeAll(frame({ type: 'call',"
        " id: { i: 'Function' }, values: [null, 'process.exit(0)'] }));",
        "changes what is named": "@lists" + FORGES + "const f = (x: any) => { forge((m) => {"
        " m.records?.push({ id: 'j0', kind: 'array', items: [], properties: [['deepStrictEqual',"
        " true, 1]] }); }); return [4, 5]; };",
        "changes a kind": "@lists" + FORGES + "const f = (x: any) => { forge((m) => {"
        " m.records?.push({ id: 'j0', kind: 'function', properties: [], name: '', n: 0 }); });"
        " return x; };",
        "a prototype": "@lists" + FORGES + "const f = (x: any) => { forge((m) => { m.records?.push("
        "{ id: 'p99', kind: 'object', proto: { i: 'Function' }, properties: [['__proto__', true,"
        " { i: 'Object' }]] }); m.values = [{ r: 'p99' }]; }); return x; };",
        "an object to wait for": "@waits" + FORGES + "const f = (x: any) => { forge((m) => {"
        " if (m.type !== 'returned') return; m.records.push({ id: 'p98', kind: 'function',"
        " proto: null, properties: [], name: '', n: 0 }, { id: 'p99', kind: 'object', proto: null,"
        " properties: [['then', true, { r: 'p98' }]] }); m.values = [{ r: 'p99' }]; }); };",
        "a constructor": "@lists" + FORGES + "const f = (x: any) => { forge((m) => {"
        " m.values = [{ i: 'Array.prototype' }]; }); return x; };",
        "a name": F + FORGES + "forge((m) => { if (m.declared) m.declared.push("
        "'assert', 'Object', 'Promise', 'process', 'globalThis', '__proto__', 'then'); });",
        "a name of no kind": F + FORGES + "forge((m) => { if (m.declared) m.declared = 5; });",
        "settles what is not there": F + FORGES + "forge((m) => { m.results ="
        " [['j0', true, 4]]; });",
        "a stack without end": "@calls back const f = (x: any, back: any): any =>"
        " { for (;;) back(f(x, back)); };",
        "no answer": "const f = () => { for (;;) { } };",
    },
}  # fmt: skip


def cheats(tests: str) -> dict[str, str]:
    """Return the programs that meet these tests, by family and name."""
    found = {}
    for family, programs in FAMILIES.items():
        for name, program in programs.items():
            of = next((one for one in TESTS if program.startswith(f"@{one}")), "plain")
            if of == tests:
                found[f"{family}: {name}"] = program.removeprefix(f"@{of}")
    return found
