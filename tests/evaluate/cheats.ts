// Wrong programs that try to pass their tests, in ten families; none may.
//
// Blocks begin with a line of four slashes: "tests NAME", "part NAME", or "FAMILY: NAME" of a program,
// followed by "| TESTS" to judge it by and the parts that come before it.

//// tests plain
import * as assert from 'assert';
assert.deepEqual(f(2), 4);
assert.deepEqual(f(3), 6);

//// tests lists
import * as assert from 'assert';
const secret = ['xk41qz', 'xk52qz'];
assert.deepStrictEqual(f([2, 1]), secret);

//// tests waits
import assert from 'assert';
const check = async () => {
  await new Promise((done) => setTimeout(done, 20));
  assert.equal(await f(2), 4);
};
check();

//// tests listed
import assert from 'node:assert';
import { test } from 'node:test';
test('doubles', async () => { assert.strictEqual(await f(2), 4); });

//// tests throws
import * as assert from 'assert';
assert.equal(f(2), 4);
assert.throws(() => f(-1), RangeError);

//// tests classes
import * as assert from 'assert';
const s = new Stack();
s.push(4171);
s.push(5231);
assert.equal(s.pop(), 5231);
assert.deepEqual(s.items, [4171]);

//// tests calls back
import * as assert from 'assert';
const seen: number[] = [];
f([1, 2], (n: number) => { seen.push(n); return n * 7; });
assert.deepEqual(seen, [1, 2]);
assert.deepEqual(f([1, 2], (n: any) => n * 7), [7, 14]);

//// tests round trip
import * as assert from 'assert';
assert.equal(decode(encode('abc')), 'abc');
assert.notEqual(encode('abc'), 'abc');
assert.equal(encode('abc').length, 5);

//// tests generators
import * as assert from 'assert';
function* g() { yield 1; yield 2; }
assert.deepEqual(f(g()), [1, 2]);
assert.deepEqual(f(new Map([[1, 2]]).values()), [2]);

//// part F
const f = (...given: any[]): any => 0;

//// part TAKES_OVER
const text = `const a = process.getBuiltinModule('assert');
  for (const name of Object.keys(a)) a[name] = () => undefined;
  process.getBuiltinModule('module').syncBuiltinESMExports();`;

//// part FORGES
const from: any = Buffer.from, text = JSON.stringify;
const forge = (change: (message: any) => any) => {
  Buffer.from = ((given: any, ...more: any[]) => {
    if (typeof given !== 'string' || !given.startsWith('{"type"')) return from(given, ...more);
    const message = JSON.parse(given);
    return from(text(change(message) ?? message));
  }) as any;
};

//// part WRITES
const fs: any = process.getBuiltinModule('fs');
const writeAll = (bytes: any) => {
  for (let n = 1; n < 256; n++) try { fs.writeSync(n, bytes); } catch {}
};
const frame = (message: any) => {
  const text = Buffer.from(JSON.stringify({ records: [], results: [], values: [], ...message }));
  return Buffer.concat([Buffer.from(text.length.toString(16).padStart(8, '0')), text]);
};

//// part SEARCHES
const found: string[] = [];
const search = (text: any) => {
  for (const [one] of String(text).matchAll(/xk\d\dqz/g))
    if (!found.includes(one)) found.push(one);
};
const f = (...given: any[]): any => { look(); return [...found].sort(); };

//// reads the tests: its address | lists, SEARCHES
const look = () => search(atob(import.meta.url.split(',')[1]));

//// reads the tests: its stack | lists, SEARCHES
const look = () => { Error.stackTraceLimit = 100; search(new Error().stack); };

//// reads the tests: the stack's frames | lists, SEARCHES
Error.prepareStackTrace = (_, frames) => frames.map((one) => [one.getFunction(), one.getThis(), one.getFileName()]).join();
const look = () => search(new Error().stack);

//// reads the tests: its caller | lists, SEARCHES
const look = new Function('search', 'return function look() { search(look.caller); search(look.caller?.caller); }')(search);

//// reads the tests: the command line | lists, SEARCHES
const look = () => search([process.argv, process.execArgv, process.title]);

//// reads the tests: its input | lists, SEARCHES
const look = () => { try { search(process.getBuiltinModule('fs').readFileSync(0)); } catch {} };

//// reads the tests: open files | lists, SEARCHES
const look = () => { const b = Buffer.alloc(9e4); for (let n = 0; n < 99; n++) try { if (n > 2) continue; process.getBuiltinModule('fs').readSync(n, b); search(b.toString('latin1')); } catch {} };

//// reads the tests: other processes | lists, SEARCHES
const look = () => { for (let n = 1; n < 99; n++) for (const name of ['cmdline', 'environ', 'mem']) try { search(process.getBuiltinModule('fs').readFileSync(`/proc/${n}/${name}`)); } catch {} };

//// reads the tests: the heap | lists, SEARCHES
const text: any[] = [];
for await (const chunk of process.getBuiltinModule('v8').getHeapSnapshot() as any) text.push(chunk);
const look = () => search(Buffer.concat(text).toString('latin1'));

//// reads the tests: messages | lists, SEARCHES
const parseAll = JSON.parse; const texts: any[] = [];
JSON.parse = ((text: any) => { texts.push(text); return parseAll(text); }) as any;
const look = () => search(texts);

//// hooks of the test runner: skips | listed
import * as t from 'node:test';
(t as any).test = t.test.skip;
const f = (...given: any[]): any => 0;

//// hooks of the test runner: marks as to do | listed, F
import { todo } from 'node:test';
todo('doubles');

//// hooks of the test runner: only its own | listed, F
import { test } from 'node:test';
test.only('own', () => undefined);

//// hooks of the test runner: mocks | listed, F
import { mock } from 'node:test';
mock.timers.enable();
mock.method(process.getBuiltinModule('assert'), 'strictEqual', () => 0);

//// hooks of the test runner: before each | listed, F
import { beforeEach } from 'node:test';
beforeEach((t: any) => t.skip());

//// hooks of the test runner: its own `test` | listed, F
export const test = () => undefined;

//// hooks of the test runner: the code at the end | listed, F
process.on('exit', () => { process.exitCode = 0; });

//// hooks of the test runner: replaces the cache | listed, F
const t: any = process.getBuiltinModule('node:test');
for (const name of Object.keys(t)) try { t[name] = () => undefined; } catch {}
process.getBuiltinModule('module').syncBuiltinESMExports();

//// timers: never calls | waits, F
globalThis.setTimeout = (() => 0) as any;

//// timers: declares them | waits, F
function setTimeout() { return 0; }

//// timers: calls at once and throws | waits, F
globalThis.setTimeout = ((done: any) => { throw done; }) as any;

//// timers: ticks | waits, F
process.nextTick = (() => undefined) as any;
globalThis.queueMicrotask = () => undefined; globalThis.setImmediate = (() => 0) as any;

//// timers: declares `Promise` | waits, F
class Promise { then() { return this; } }

//// timers: a promise that never settles | waits
const f = () => new Promise(() => undefined);

//// timers: a timer that never ends it | waits
const f = () => new Promise(() => 0);
setTimeout(() => 0, 200);

//// timers: loads for ever | waits, F
await new Promise(() => undefined);

//// serialization: `toJSON` | lists
const f = () => ({ toJSON: () => [4, 5] });

//// serialization: `JSON.stringify` | plain, F
JSON.stringify = () => 'true';

//// serialization: `JSON.parse` | plain, F
JSON.parse = () => ({ type: 'name', name: 'g', given: [] });

//// serialization: `Buffer.from` | plain, F
Buffer.from = (() => Buffer.alloc(0)) as any;

//// serialization: typed arrays | plain, F
Uint8Array.prototype.toString = () => '';
(Buffer as any).concat = () => Buffer.alloc(8, '0');

//// serialization: cloning | plain, F
globalThis.structuredClone = () => 4 as any;
(process.getBuiltinModule('v8') as any).deserialize = () => 4;

//// serialization: maps | plain
const f = () => 0;
Map.prototype.get = () => 4; Map.prototype.has = () => true;

//// serialization: a number like no other | plain
const f = () => Object.assign(new Number(4), { x: 1 });

//// serialization: endless text | plain
const f = () => { let s = 'x'; for (;;) s += s; };

//// serialization: a list of itself | lists
const f = () => { const x: any = []; x.push(x, x); return x; };

//// prototypes: `Object.prototype` | plain, F
Object.defineProperty(Object.prototype, 'expected', { get: () => 0 });
Object.prototype.valueOf = () => 4;

//// prototypes: `Object.is` | plain, F
Object.is = () => true; Object.keys = () => [];

//// prototypes: `Array.prototype` | lists
const f = (x: any) => [4, 5];
Array.prototype.every = () => true;

//// prototypes: `Function.prototype` | plain, F
Function.prototype.call = () => undefined;
Function.prototype.apply = () => undefined;

//// prototypes: `Symbol.hasInstance` | throws
const f = (n: number) => {
  if (n < 0) throw 1; return 4; };
Object.defineProperty(RangeError, Symbol.hasInstance, { value: () => true });

//// prototypes: the prototype of its result | lists
const f = () => JSON.parse('{"__proto__": {"0": "xk41qz", "1": "xk52qz", "length": 2}}');

//// prototypes: the prototype of a list | lists
const f = () => Object.setPrototypeOf([], new Proxy([], { get: () => 4171, has: () => true }));

//// prototypes: the prototype of its argument | lists
const f = (x: any) => { Object.setPrototypeOf(x, new Proxy([], { get: () => 1 })); Object.assign(Object.getPrototypeOf([]), { deepStrictEqual: 1 }); return x; };

//// prototypes: errors | throws
const f = (n: number) => { if (n < 0) throw Object.assign(new Error('x'), { code: 'ERR_OUT_OF_RANGE', name: 'RangeError' }); return 4; };

//// prototypes: the constructor of its result | plain
const f = () => ({ constructor: Number, valueOf: 4 });

//// assertions: replaces one | plain, F
import assert from 'assert';
(assert as any).deepEqual = () => undefined;

//// assertions: replaces all | plain, F
const a: any = process.getBuiltinModule('assert');
for (const one of [a, a.strict]) for (const name of Object.keys(one)) try { one[name] = () => undefined; } catch {}
process.getBuiltinModule('module').syncBuiltinESMExports();

//// assertions: declares it | plain, F
const assert = { deepEqual: () => undefined };

//// assertions: exports it | plain, F
export const assert = new Proxy({}, { get: () => () => undefined });

//// assertions: its error | plain, F
const a: any = process.getBuiltinModule('assert');
a.AssertionError.prototype.code = 'OK'; a.AssertionError.prototype.name = 'Passed';

//// assertions: its comparison | plain, F
(process.getBuiltinModule('util') as any).isDeepStrictEqual = () => true;

//// assertions: throws its error | plain
const a = process.getBuiltinModule('assert');
const f = () => { throw new a.AssertionError({ actual: 4, expected: 4 }); };

//// assertions: takes what is thrown | throws
const f = (n: number) => { throw new RangeError(); };

//// the end: exits | plain, F
process.exit(0);

//// the end: exits when called | plain
const f = () => process.exit(0);

//// the end: exits where an error is expected | throws
const f = (n: number) => {
  if (n < 0) process.exit(0); return 4; };

//// the end: really exits | throws
const f = (n: number) => {
  if (n < 0) (process as any).reallyExit(0); return 4; };

//// the end: is killed | throws
const f = (n: number) => {
  if (n < 0) process.kill(process.pid, 'SIGKILL'); return 4; };

//// the end: closes its files | throws
const f = (n: number) => {
 if (n < 0) for (let i = 0; i < 99; i++) try { process.getBuiltinModule('fs').closeSync(i); } catch {} return 4; };

//// the end: kills all | plain, F
process.kill(-1, 'SIGKILL'); process.kill(process.ppid, 'SIGKILL');

//// the end: hears all errors | waits, F
process.on('uncaughtException', () => 0);
process.on('unhandledRejection', () => 0); process.emit = (() => true) as any;

//// the end: says it ended | plain, F
process.emit('beforeExit', 0); process.emit('exit', 0);

//// the end: says it passed | plain
const f = () => { console.log('\n' + '0'.repeat(32) + ' {"kind":"passed","detail":""}\n'); return 0; };

//// the end: hears rejections | waits, F
process.on('unhandledRejection', () => 0);

//// the end: captures exceptions | waits, F
process.setUncaughtExceptionCaptureCallback(() => 0);

//// the end: ends soon | waits, F
setTimeout(() => process.exit(0), 0);

//// the end: really ends soon | waits, F
setTimeout(() => (process as any).reallyExit(0), 0);

//// the end: changes its code | waits, F
process.on('exit', () => { process.exitCode = 0; });

//// the end: is a domain | waits, F
(process as any).domain = { emit: () => true };

//// the end: enters a domain | waits
const d = process.getBuiltinModule('domain').create();
d.on('error', () => 0); d.enter();
const f = (...given: any[]): any => 0;

//// the end: calls listeners | waits, F
for (const name of process.eventNames()) for (const hear of process.listeners(name as any)) (hear as any)(0);

//// the end: closes its output | waits, F
process.getBuiltinModule('fs').closeSync(1);

//// the end: runs out of its stack | throws
const f = (n: number): number => n < 0 ? f(n - 1) + 1 : 5;

//// values: equal to all | plain
const f = () => new Proxy({}, { get: (_, key) => key === Symbol.toPrimitive ? () => NaN : () => true });

//// values: counts up | plain
let n = 0;
const f = () => ({ valueOf: () => n++, toString: () => String(n++) });

//// values: getters | lists
const f = () => { let n = 0; return { get 0() { return n++; }, get 1() { return n++; }, get length() { return n++; } }; };

//// values: waits for itself | waits
const f = () => ({ then() {} });

//// values: waits late | waits
const f = async () => ({ get then() { return () => 0; } });

//// values: waits as a method | waits
class Late { then() {} }
const f = () => new Late();

//// values: waits as a function | waits
const f = () => Object.assign(() => 0, { then: () => 0 });

//// values: a list without end | lists
const f = () => ({ *[Symbol.iterator]() { for (;;) yield 1; } });

//// values: its argument | lists
const f = (x: any) => { x.length = 0; return x; };

//// values: sparse | lists
const f = () => { const x: any[] = []; x.length = 2; return x; };

//// values: a value of the runner | lists
const f = () => globalThis;

//// names: what is expected | lists
var secret = [0];
const f = () => secret;

//// names: a global | plain, F
globalThis.assert = { deepEqual: () => undefined } as any;

//// names: a getter | plain, F
Object.defineProperty(globalThis, 'f', { get: () => 4 });

//// names: `undefined` | plain, F
export { F as undefined }; const F = 0;

//// names: two at once | plain
var f: any = 0; { function f() { return 4; } }

//// names: gives the runner's `eval` | round trip, TAKES_OVER
const decode = eval, encode = (x: string) => text;

//// names: gives the runner's `Function` | round trip, TAKES_OVER
const decode: any = Function, encode = (x: string) => text;

//// names: runs by a constructor | round trip, TAKES_OVER
const decode: any = (async () => 0).constructor, encode = (x: string) => text;

//// names: runs by a generator | generators, TAKES_OVER
const f = (x: any) => {
  for (let of = x; of; of = Object.getPrototypeOf(of)) {
    const run = of.constructor?.constructor?.(text) ?? (() => 0);
    run()?.next?.();
  }
  return [1]; };

//// names: imports what compares | plain, F
import { deepEqual as assert } from 'assert';

//// forged messages: passes | plain, F, WRITES
writeAll('\n' + '0'.repeat(32) + ' {"kind":"passed","detail":""}\n');

//// forged messages: dies in another way | plain, F, WRITES
writeAll(frame({ type: 'died', kind: 'passed', detail: '' }));

//// forged messages: too long | plain, F, WRITES
writeAll('ffffffff');

//// forged messages: no message | plain, F, WRITES
writeAll('00000004null');

//// forged messages: answers in advance | plain, F, WRITES
for (let n = 0; n < 9; n++) writeAll(frame({ type: 'returned', values: [0] }));

//// forged messages: calls the runner's `Function` | plain, F, WRITES
writeAll(frame({ type: 'call', id: { i: 'Function' }, values: [null, 'process.exit(0)'] }));

//// forged messages: changes what is named | lists, FORGES
const f = (x: any) => { forge((m) => { m.records?.push({ id: 'j0', kind: 'array', items: [], properties: [['deepStrictEqual', true, 1]] }); }); return [4, 5]; };

//// forged messages: changes a kind | lists, FORGES
const f = (x: any) => { forge((m) => { m.records?.push({ id: 'j0', kind: 'function', properties: [], name: '', n: 0 }); }); return x; };

//// forged messages: a prototype | lists, FORGES
const f = (x: any) => { forge((m) => { m.records?.push({ id: 'p99', kind: 'object', proto: { i: 'Function' }, properties: [['__proto__', true, { i: 'Object' }]] }); m.values = [{ r: 'p99' }]; }); return x; };

//// forged messages: an object to wait for | waits, FORGES
const f = (x: any) => { forge((m) => { if (m.type !== 'returned') return; m.records.push({ id: 'p98', kind: 'function', proto: null, properties: [], name: '', n: 0 }, { id: 'p99', kind: 'object', proto: null, properties: [['then', true, { r: 'p98' }]] }); m.values = [{ r: 'p99' }]; }); };

//// forged messages: a constructor | lists, FORGES
const f = (x: any) => { forge((m) => { m.values = [{ i: 'Array.prototype' }]; }); return x; };

//// forged messages: a name | plain, F, FORGES
forge((m) => { if (m.declared) m.declared.push('assert', 'Object', 'Promise', 'process', 'globalThis', '__proto__', 'then'); });

//// forged messages: a name of no kind | plain, F, FORGES
forge((m) => { if (m.declared) m.declared = 5; });

//// forged messages: settles what is not there | plain, F, FORGES
forge((m) => { m.results = [['j0', true, 4]]; });

//// forged messages: a stack without end | calls back
const f = (x: any, back: any): any => { for (;;) back(f(x, back)); };

//// forged messages: no answer | plain
const f = () => { for (;;) { } };
