// Programs that use everything that crosses between program and tests, and pass: objects of classes,
// errors, arguments that change, functions of the tests, promises, output.

//// a class
class Stack<T> {
  private items: T[] = [];
  get size() { return this.items.length; }
  push(item: T) { this.items.push(item); return this; }
  pop() { if (!this.size) throw new RangeError('it is empty'); return this.items.pop(); }
  static of(...all: any[]) { return all.reduce((made, one) => made.push(one), new Stack()); }
  *[Symbol.iterator]() { yield* this.items; }
}

//// a class: its tests
const s = new Stack<number>().push(1).push(2);
assert.equal(s.size, 2); assert.equal(s.pop(), 2); assert.ok(s instanceof Stack);
assert.deepEqual([...Stack.of(1, 2)], [1, 2]); assert.deepStrictEqual(Stack.of(1), s);
assert.throws(() => new Stack().pop(), RangeError);

//// errors and generators
class Bad extends Error { constructor(text: string, public place = 7) { super(text); } }
async function f(n: number) { if (n < 0) throw new Bad('negative'); return n * 2; }
async function* g() { yield f(1); }

//// errors and generators: its tests
assert.equal(await f(2), 4);
await assert.rejects(f(-1), Bad);
await assert.rejects(f(-1), { message: 'negative', place: 7 });
for await (const one of g()) assert.equal(one, 2);

//// arguments that change
function order(all: number[]) { all.sort((a, b) => a - b); }
function change(all: Map<string, any>) { all.get('a').b = new Set([1]); all.delete('b'); }
let n = 0; const count = () => ++n; enum Color { Red = 'r' }

//// arguments that change: its tests
const x = [3, 1, 2];
order(x); assert.deepStrictEqual(x, [1, 2, 3]); count(); assert.equal(n, 1);
const y = new Map<string, any>([['a', {}], ['b', 2]]); change(y);
assert.deepStrictEqual(y, new Map([['a', { b: new Set([1]) }]]));
assert.equal(Color.Red, 'r'); assert.equal(count.name, 'count');

//// functions of the tests
const map = (all: any[], to: any) => all.map((one) => to(one));
const later = (then: any) => { setTimeout(() => then(null, 5), 5); };
const retry = async (run: any) => { for (;;) try { return await run(); } catch {} };
const list = (all: any) => [...all];
function greet() { console.log('Hello', { a: 1 }); }

//// functions of the tests: its tests
assert.deepEqual(map([1, 2], (n: number) => map([n], String)), [['1'], ['2']]);
assert.throws(() => map([1], () => { throw new TypeError(); }), TypeError);
later((error: any, n: number) => assert.equal(n, 5));
let n = 0; assert.equal(await retry(async () => { if (++n < 3) throw 1; return n; }), 3);
assert.deepEqual(list(new Map([[1, 2]]).values()), [2]);
const said: any[] = []; console.log = (...all: any[]) => { said.push(all); };
greet(); assert.deepEqual(said, [['Hello', { a: 1 }]]);

//// values and promises
abstract class Shape { abstract area(): number; tell() { return `of ${this.area()}`; } }
const values = () => [NaN, -0, 10n, undefined, null, '\ud800', new Date(5), /x/gi,
  new Float64Array([1.5]), Buffer.from('a'), Symbol.iterator, [, 1], { __proto__: null }];
const sleep = (ms: number, value: any) => new Promise((go) => setTimeout(() => go(value), ms));

//// values and promises: its tests
class Square extends Shape { area() { return 4; } }
assert.equal(new Square().tell(), 'of 4');
assert.deepStrictEqual(values(), [NaN, -0, 10n, undefined, null, '\ud800', new Date(5),
  /x/gi, new Float64Array([1.5]), Buffer.from('a'), Symbol.iterator, [, 1],
  Object.create(null)]);
assert.deepEqual(await Promise.all([sleep(9, 1), sleep(1, 2)]), [1, 2]);
assert.equal(await Promise.race([sleep(400, 1), sleep(1, 2)]), 2);
