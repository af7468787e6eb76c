"""JavaScript that two Node processes share: values and calls cross as JSON text over pipes.

It also strips types from TypeScript, prepares imports, loads a module and formats errors.

Each side has a copy of an object that crossed; its functions are stubs that call the other side. A
message contains the changes to the objects it names and to a few earlier ones, so that an owner
sees changed arguments. A side never runs or parses the other's code, and of the judge's objects
the program can change only the data of those that the tests passed to it.

The process that runs this sets ``SIDE`` (``judge`` or ``program``), ``channel`` and ``broken``.
"""

LINK = r"""
const { isBuiltin, stripTypeScriptTypes } = require('module');
const describeError = (error) => {
  try {
    const text = `${error?.name ?? typeof error}: ${error?.message ?? error}`;
    return text.replace(/data:text\/javascript;base64,[\w+\/=]*/g, 'the program').slice(0, 300);
  } catch { return 'an error that cannot be read'; }
};
const isAssertion = (error) => {
  try { return error?.code === 'ERR_ASSERTION'; } catch { return false; }
};
const strip = (code) => {
  try { return { js: stripTypeScriptTypes(code, { mode: 'transform' }) }; }
  catch (error) { return { error: describeError(error) }; }
};
const IMPORT =
  /^import\b((?:[\w$*, ]|\{[\w$,\s]*\})+?)(?<![\w$])from *['"]([^'"\n]+)['"] *;?/gm;
const wordsOf = (bound) =>
  (bound.match(/[\w$]+/g) ?? []).filter((word) => !['as', 'type'].includes(word));
const boundBy = (bound) => wordsOf(bound.replace(/(?:\*|[\w$]+)\s+as\s+/g, ''));
// As TypeScript does, leave out what is imported and never named: it may not be installed.
const withoutUnused = (code) => code.replace(IMPORT, (whole, bound, source) => {
  const naming = (name) => new RegExp(`(?<![\\w$])${name.replace(/\$/g, '\\$')}(?![\\w$])`);
  const isNamed = (name) => code.split(naming(name)).length > 2;
  return isBuiltin(source) || wordsOf(bound).some(isNamed) ? whole : '';
});
const load = (js) => import('data:text/javascript;base64,' + Buffer.from(js).toString('base64'));
const { readSync, writeSync } = require('fs');
const types = require('util').types;
const { parse, stringify } = JSON;
const { apply, construct, ownKeys, defineProperty, deleteProperty, getPrototypeOf, setPrototypeOf,
  getOwnPropertyDescriptor } = Reflect;
const MOST_BYTES = 1 << 24;
const N_RECENT = 8;
const MOST_RECENT_CHARS = 100_000;
const isFunction = (value) => typeof value === 'function';

// Both sides have these, so they cross by name.
const named = new Map();
const names = new Map();
const share = (name, value) => { named.set(name, value); names.set(value, name); };
const PLAIN = ['Object', 'Function', 'Array', 'Map', 'Set', 'Date', 'RegExp', 'Promise', 'Symbol',
  'Number', 'String', 'Boolean', 'BigInt', 'ArrayBuffer', 'DataView', 'Buffer',
  ...ownKeys(globalThis).filter((name) => /^[A-Z]\w*(Error|Array)$/.test(String(name)))];
for (const name of PLAIN) {
  share(name, globalThis[name]);
  share(`${name}.prototype`, globalThis[name].prototype);
}
// With these the program could have texts of its own run by the judge.
const RUNS_TEXT = [Function, async () => 0, function* () {}, async function* () {}]
  .map((of) => of.constructor);
RUNS_TEXT.forEach((one, n) => {
  share(`text.${n}`, one);
  if (SIDE === 'program') names.delete(one);
});
const CONSTRUCTORS = new Set(PLAIN.filter((name) => name !== 'Function'));
const PROTOTYPES = new Set(PLAIN.map((name) => `${name}.prototype`));
// Of the others the program gets its own, so that it cannot call those of the judge.
for (const name of ownKeys(globalThis)) {
  const value = typeof name === 'symbol' ? null : getOwnPropertyDescriptor(globalThis, name).value;
  for (const of of [{ [name]: value }, value, value?.prototype]) {
    if (of === null || !['object', 'function'].includes(typeof of) || of === globalThis) continue;
    for (const key of ownKeys(of)) {
      const one = getOwnPropertyDescriptor(of, key)?.value;
      if (typeof key === 'symbol' || !isFunction(one) || names.has(one)) continue;
      const path = `${name}.${of === value ? 'of.' : of === value?.prototype ? 'to.' : ''}${key}`;
      if (SIDE === 'judge') share(path, one); else named.set(path, one);
    }
  }
}
const WELL_KNOWN = new Map(ownKeys(Symbol).map((name) => [Symbol[name], name])
  .filter(([value]) => typeof value === 'symbol'));

const ids = new Map();
const objects = new Map();
const last = new Map();  // The text of each object's record as both sides have it.
const fixed = new Set();  // Ids of prototypes, which only their owner changes.
const resolvers = new Map();  // Of promises of the other side that have not settled.
const thenables = new WeakMap();
let settled = [];
let recent = [];
let queue = [];
let queued = new Set();

const isMine = (id) => id[0] === SIDE[0];
const kindOf = (value) => {
  if (typeof value !== 'object') return typeof value;
  if (Array.isArray(value)) return 'array';
  if (types.isNativeError(value)) return 'error';
  if (ArrayBuffer.isView(value) || types.isAnyArrayBuffer(value)) return 'bytes';
  for (const kind of ['Map', 'Set', 'Date', 'RegExp', 'Promise'])
    if (types[`is${kind}`](value)) return kind.toLowerCase();
  return 'object';
};
const isFixed = (id, value) =>
  fixed.has(id) || ['function', 'symbol', 'promise'].includes(kindOf(value));
const identify = (value) => {
  let id = ids.get(value);
  if (id === undefined) {
    id = `${SIDE[0]}${ids.size}`;
    ids.set(value, id);
    objects.set(id, value);
    if (kindOf(value) === 'promise') value.then(
      (result) => settled.push([id, true, result]), (error) => settled.push([id, false, error]));
  }
  if (!queued.has(id)) { queued.add(id); queue.push(id); }
  return id;
};
const asPromise = (value) => {
  if (types.isPromise(value) || !isFunction(value.then)) return value;
  if (!thenables.has(value)) thenables.set(value, Promise.resolve(value));
  return thenables.get(value);
};
const encode = (value) => {
  if (value === null || typeof value === 'string' || typeof value === 'boolean') return value;
  if (value === undefined || value === globalThis || value === process) return { u: 0 };
  if (typeof value === 'bigint') return { b: `${value}` };
  if (typeof value === 'number')
    return Number.isFinite(value) && !Object.is(value, -0) ? value
      : { n: Object.is(value, -0) ? '-0' : `${value}` };
  if (names.has(value)) return { i: names.get(value) };
  if (WELL_KNOWN.has(value)) return { s: WELL_KNOWN.get(value) };
  return { r: identify(typeof value === 'symbol' ? value : asPromise(value)) };
};
const decode = (text) => {
  if (text === null || typeof text !== 'object') return text;
  if ('r' in text) return objects.get(text.r) ?? broken(`it names ${text.r}`);
  if ('i' in text && (SIDE === 'program' || CONSTRUCTORS.has(text.i))) return named.get(text.i);
  // The judge's own could be changed by tests that change what they are given.
  if (PROTOTYPES.has(text.i)) return {};
  if ('s' in text) return Symbol[text.s];
  if ('n' in text) return Number(text.n);
  if ('b' in text) return BigInt(text.b);
  return 'u' in text ? undefined : broken('a value of no kind');
};

const LEFT_OUT = { error: ['stack'], array: ['length'], regexp: ['lastIndex'],
  function: ['name', 'length', 'arguments', 'caller'] };
const describeProperties = (value, kind) => {
  // What its functions hold stays with the judge.
  if (kind === 'bytes' || (kind === 'function' && SIDE === 'judge')) return [];
  const properties = [];
  for (const key of ownKeys(value)) {
    if (LEFT_OUT[kind]?.includes(key) || (kind === 'array' && /^\d+$/.test(String(key)))) continue;
    const found = getOwnPropertyDescriptor(value, key);
    if (found === undefined) continue;
    const parts = 'value' in found ? [found.value] : [found.get, found.set];
    properties.push([encode(key), found.enumerable, ...parts.map(encode)]);
  }
  return properties;
};
const describe = (id) => {
  const value = objects.get(id);
  const kind = kindOf(value);
  const record = { id, kind };
  if (kind === 'symbol') return { ...record, text: value.description };
  const of = getPrototypeOf(value);
  // A class of the tests may extend one of the program.
  if (isMine(id) || (SIDE === 'judge' && ids.has(of) && isMine(ids.get(of)))) {
    record.proto = of === null || (kind === 'function' && SIDE === 'judge') ? null : encode(of);
    if (record.proto?.r) fixed.add(record.proto.r);
  }
  if (isMine(id)) {
    record.frozen = kind !== 'bytes' && Object.isFrozen(value);
  }
  if (kind === 'function') Object.assign(record, { name: String(value.name), n: value.length });
  if (kind === 'array')
    record.items = Array.from(value, (one, n) => Object.hasOwn(value, n) ? encode(one) : { h: 0 });
  if (kind === 'map') record.items = [...value].map(([key, item]) => [encode(key), encode(item)]);
  if (kind === 'set') record.items = [...value].map(encode);
  if (kind === 'date') record.time = encode(value.getTime());
  if (kind === 'regexp') record.text = [value.source, value.flags, value.lastIndex];
  if (kind === 'bytes') {
    const bytes = ArrayBuffer.isView(value)
      ? Buffer.from(value.buffer, value.byteOffset, value.byteLength) : Buffer.from(value);
    record.text = bytes.toString('base64');
    record.type = Buffer.isBuffer(value) ? 'Buffer'
      : Object.prototype.toString.call(value).slice(8, -1);
  }
  record.properties = describeProperties(value, kind);
  return record;
};

const makeStub = (id) => {
  const stub = function (...given) {
    const result = call(id, this, given, new.target !== undefined);
    if (new.target === undefined || new.target === stub) return result;
    identify(new.target.prototype);
    return setPrototypeOf(result, new.target.prototype) && result;
  };
  return stub;
};
const create = ({ id, kind, text, type }) => {
  if (typeof id !== 'string' || !/^[jp]\d+$/.test(id)) broken('an id of no side');
  if (objects.has(id)) {
    if (kindOf(objects.get(id)) !== kind) broken(`${id} becomes ${kind}`);
    return;
  }
  if (isMine(id)) broken(`it names ${id}`);
  const value = {
    function: () => makeStub(id), symbol: () => Symbol(text), array: () => [], map: () => new Map(),
    set: () => new Set(), date: () => new Date(0), regexp: () => new RegExp(text[0], text[1]),
    error: () => new Error(), object: () => ({}),
    promise: () => new Promise((...both) => { resolvers.set(id, both); }),
    bytes: () => {
      const bytes = Uint8Array.from(Buffer.from(text, 'base64'));
      if (type === 'Buffer') return Buffer.from(bytes);
      return type === 'ArrayBuffer' ? bytes.buffer : new (decode({ i: type }))(bytes.buffer);
    },
  }[kind]?.() ?? broken(`${id} is of no kind`);
  objects.set(id, value);
  ids.set(value, id);
};
const fillProperties = (value, properties, mine) => {
  const kept = new Set();
  for (const [name, enumerable, ...parts] of properties) {
    const key = decode(name);
    kept.add(key);
    const [one, other] = parts.map(decode);
    // It would be waited for: the program could keep the tests from what follows.
    if (SIDE === 'judge' && key === 'then' && (parts.length > 1 || isFunction(one)))
      broken('an object that can be waited for');
    const old = getOwnPropertyDescriptor(value, key);
    if (mine && (parts.length > 1 || (old && !('value' in old)))) continue;
    if (old && 'value' in old && parts.length === 1) {
      if (!Object.is(old.value, one)) defineProperty(value, key, { value: one });
      continue;
    }
    defineProperty(value, key, parts.length > 1
      ? { get: one, set: other, enumerable, configurable: true }
      : { value: one, enumerable, writable: true, configurable: true });
  }
  return kept;
};
const fill = (record) => {
  const { id, kind, items, properties } = record;
  const value = objects.get(id);
  const mine = isMine(id);
  if (kind === 'symbol') return;
  if (mine && isFixed(id, value)) broken(`${id} is not its own`);
  if (Object.isFrozen(value) && kind !== 'bytes') return;
  const { proto } = record;
  if (!mine || (proto && SIDE === 'program')) {
    if (proto?.r) fixed.add(proto.r);
    const of = PROTOTYPES.has(proto?.i) ? named.get(proto.i) : decode(proto);
    if (of !== null || kind === 'object') setPrototypeOf(value, of);
  }
  if (kind === 'function') {
    defineProperty(value, 'name', { value: record.name, configurable: true });
    defineProperty(value, 'length', { value: record.n, configurable: true });
  }
  if (kind === 'array') {
    value.length = items.length;
    items.forEach((item, n) => {
      if (item !== null && typeof item === 'object' && 'h' in item) deleteProperty(value, n);
      else defineProperty(value, n,
        { value: decode(item), enumerable: true, writable: true, configurable: true });
    });
  }
  if (kind === 'map') {
    value.clear();
    for (const [key, item] of items) value.set(decode(key), decode(item));
  }
  if (kind === 'set') { value.clear(); for (const item of items) value.add(decode(item)); }
  if (kind === 'date') value.setTime(decode(record.time));
  if (kind === 'regexp') value.lastIndex = Number(record.text[2]);
  if (kind === 'bytes') {
    const bytes = ArrayBuffer.isView(value)
      ? new Uint8Array(value.buffer, value.byteOffset, value.byteLength) : new Uint8Array(value);
    bytes.set(Buffer.from(record.text, 'base64').subarray(0, bytes.length));
  }
  const kept = fillProperties(value, properties, mine);
  if (kind === 'object' || kind === 'error') for (const key of ownKeys(value))
    if (!kept.has(key) && !LEFT_OUT[kind]?.includes(key)) deleteProperty(value, key);
  if (record.frozen && !mine) Object.freeze(value);
};

const remember = (some) => { recent = [...new Set([...recent, ...some])].slice(-N_RECENT); };
const pack = (type, fields, given = []) => {
  queue = [];
  queued = new Set();
  const values = given.map(encode);
  remember(queue);
  for (const id of recent)
    if ((last.get(id)?.length ?? 0) < MOST_RECENT_CHARS) identify(objects.get(id));
  const results = settled.map(([id, isRight, result]) => [id, isRight, encode(result)]);
  settled = [];
  const records = [];
  for (const id of queue) {
    const isKnown = last.has(id) && fixed.has(id);
    if (isKnown || (!isMine(id) && isFixed(id, objects.get(id)))) continue;
    const record = describe(id);
    const text = stringify(record);
    if (text !== last.get(id)) records.push(record);
    last.set(id, text);
  }
  return stringify({ type, ...fields, values, results, records });
};
const unpack = (message) => {
  message.records.forEach(create);
  message.records.forEach(fill);
  for (const { id } of message.records) {
    queued = new Set();
    last.set(id, isFixed(id, objects.get(id)) ? '' : stringify(describe(id)));
  }
  for (const [id, isRight, result] of message.results) {
    const both = resolvers.get(id) ?? broken(`${id} is settled`);
    resolvers.delete(id);
    both[isRight ? 0 : 1](decode(result));
  }
  remember(message.values.flatMap((text) => text?.r ?? []));
  return message.values.map(decode);
};

const send = (fd, text) => {
  const bytes = Buffer.from(text);
  if (bytes.length > MOST_BYTES) throw new RangeError(`a value of ${bytes.length} bytes`);
  const all = Buffer.concat([Buffer.from(bytes.length.toString(16).padStart(8, '0')), bytes]);
  for (let n = 0; n < all.length;) n += writeSync(fd, all, n);
};
const sizeOf = (head) => {
  const size = Number(`0x${head.toString('latin1')}`);
  return size <= MOST_BYTES ? size : broken('a message without a size');
};
const readBytes = (fd, size) => {
  const bytes = Buffer.alloc(size);
  for (let n = 0; n < size;) {
    const more = readSync(fd, bytes, n, size - n);
    if (more === 0) channel.ended();
    n += more;
  }
  return bytes;
};
const receive = (fd) => {
  const message = parse(readBytes(fd, sizeOf(readBytes(fd, 8))).toString());
  return { ...message, given: unpack(message) };
};
// Return the packed result of a call by the other side.
const serve = ({ id, isNew, given: [self, ...given] }) => {
  const wanted = objects.get(id);
  if (!isFunction(wanted) || !isMine(id)) broken(`it calls ${id}`);
  return answer(() => isNew ? construct(wanted, given) : apply(wanted, self, given));
};
const answer = (make) => {
  try { return pack('returned', {}, [make()]); }
  catch (error) { return pack('threw', {}, [error]); }
};
const call = (id, self, given, isNew) =>
  ask('call', { id, isNew }, [isNew ? undefined : self, ...given]);
const ask = (type, fields, given) => {
  const { type: how, given: [result] } = channel.exchange(pack(type, fields, given));
  if (how === 'threw') throw result;
  return result;
};
"""
