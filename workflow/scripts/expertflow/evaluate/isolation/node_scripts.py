"""JavaScript for two processes: one runs a record's tests, the other one the program.

The judge's reads ``{proof, prefix, said, tests, files}`` from stdin, calls the program and writes
lines ``proof {kind, detail}`` to stdout, the last of which decides. Names that the tests use and do
not declare are looked up in the program, unless Node has them. The program's process never sees
the tests; nothing there is safe from the program, it only answers for it.
"""

from expertflow.evaluate.isolation.node_link import LINK

JUDGE = (
    "'use strict';\n(() => {\nconst SIDE = 'judge';\n"
    + LINK
    + r"""
const { readFileSync } = require('fs');
const given = parse(readFileSync(0, 'utf8'));
const { proof, prefix, said, tests, files: [requests, answers, replies] } = given;
const exit = process.reallyExit.bind(process);
const { setInterval, setTimeout, console } = globalThis;
const say = (kind, detail = '') =>
  writeSync(1, `\n${proof} ${stringify({ kind, detail: String(detail) })}\n`);
// Ends the process at once: thrown, it could pass as an error that the tests expect.
const fail = (kind, detail) => { try { say(kind, detail); } finally { exit(1); } };
const failed = (error) =>
  fail(isAssertion(error) ? 'failed_tests' : 'raised', describeError(error));
const broken = (what) => fail('ended_early', `its answers cannot be read: ${what}`);

// Above zero while the program waits for a function of the tests.
let depth = 0;
let nEvents = 0;
const respond = (message) => {
  if (message.type === 'call') return serve(message);
  const print = ['log', 'info', 'debug', 'warn', 'error'].includes(message.name)
    ? console[message.name] : broken('a call of no kind');
  return answer(() => print.apply(console, message.given));
};
const receiveReply = () => {
  try { return receive(replies); }
  catch (error) { return broken(describeError(error)); }
};
const channel = {
  ended: () => fail('program_ended'),
  exchange: (text) => {
    nEvents++;
    const write = (fd, what) => {
      try { send(fd, what); }
      catch (error) { if (error.code === 'EPIPE') channel.ended(); throw error; }
    };
    write(depth > 0 ? answers : requests, text);
    for (;;) {
      const message = receiveReply();
      if (['returned', 'threw', 'state'].includes(message.type)) return message;
      if (message.type === 'died') {
        const known = ['did_not_parse', 'failed_tests', 'raised'].includes(message.kind);
        fail(known ? message.kind : 'raised', message.detail);
      }
      depth++;
      nEvents++;
      const reply = respond(message);
      write(answers, reply);
      depth--;
    }
  },
};
const poll = () => {
  const state = channel.exchange(pack('poll', {}));
  nEvents += state.results.length - 1;
  return state;
};
const sleep = (ms) => Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, ms);

say('started');
const withImports = () => {
  const bound = new Set([...tests.matchAll(IMPORT)].flatMap(([, names]) => boundBy(names)));
  const missing = [...prefix.matchAll(IMPORT)].filter(([, names, source]) =>
    isBuiltin(source) && !boundBy(names).some((name) => bound.has(name)));
  return [...missing.map(([whole]) => whole), tests].join('\n');
};
// A call of their own async function is awaited: it may wait for what never comes.
const waiting = tests.replace(/^\(async\b/gm, 'await (async');
const { error } = strip(tests);
if (error) fail('tests_did_not_parse', error);
const told = [withImports().replace(tests, () => waiting), withImports(), tests]
  .map((code) => strip(withoutUnused(code))).find((one) => !one.error);
if (told === undefined) fail('tests_did_not_parse', 'its imports');

let state = poll();
for (let ms = 1; !state.declared; ms = Math.min(2 * ms, 16)) {
  if (state.isIdle) fail('ended_early', 'the program waits for what never comes');
  sleep(ms);
  state = poll();
}
say('parsed');

// The program may not stand in for what the tests take from Node or a library for tests.
const imported = new Set([...`${prefix}\n${said}`.matchAll(IMPORT)]
  .flatMap(([, names]) => boundBy(names)));
const ofTests = new Set(['expect', 'describe', 'suite', 'it', 'test', 'before', 'after',
  'beforeEach', 'afterEach', 'beforeAll', 'afterAll', 'vi', 'jest', 'sinon',
  ...Object.keys(require('assert')).filter((name) => /[a-z][A-Z]/.test(name))]);
const ofPrefix = new Set([...prefix.matchAll(
  /\b(?:function\s*\*?|class|const|let|var|enum)\s+([\p{ID_Start}$_][\p{ID_Continue}$]*)/gu)]
  .map(([, name]) => name));
const mentioned = new Set(tests.match(/[\p{ID_Start}$_][\p{ID_Continue}$]*/gu));
for (const name of state.declared) {
  if (!mentioned.has(name)) continue;
  const isOfNode = !ofPrefix.has(name)
    && (name in globalThis || imported.has(name) || ofTests.has(name));
  const get = isOfNode
    ? () => fail('raised', `the program declares ${name}, which its tests take from elsewhere`)
    : () => ask('name', { name }, []);
  defineProperty(globalThis, name, { get, configurable: true });
}

let isLoaded = false;
process.on('uncaughtExceptionMonitor', failed);
process.on('unhandledRejection', failed);
// While the tests wait, so may the program.
setInterval(poll, 2).unref();
// What is left to do is seen twice, as what settles at first goes on after it.
let nSeen = -1;
process.on('beforeExit', () => {
  const { isIdle } = poll();
  const isQuiet = isIdle && nEvents === nSeen;
  nSeen = nEvents;
  if (!isQuiet) { setTimeout(() => 0, 1); return; }
  if (resolvers.size > 0) fail('ended_early', 'a promise that never settles');
  // The last to hear it, as node:test sets the code then.
  if (isLoaded) process.on('exit', () => {
    if (process.exitCode) fail('failed_tests', `exit code ${process.exitCode}`);
    say('passed');
  });
});
load(told.js).then(() => { isLoaded = true; }, failed);
})();
"""
)

PROGRAM = (
    "'use strict';\n(() => {\nconst SIDE = 'program';\n"
    + LINK
    + r"""
const { read, readFileSync } = require('fs');
const { prefix, said, files: [requests, answers, replies] } = parse(readFileSync(0, 'utf8'));
const exit = process.reallyExit.bind(process);
const resources = process.getActiveResourcesInfo.bind(process);
const broken = (what) => { throw new TypeError(what); };
const channel = {
  ended: () => exit(0),
  exchange: (text) => {
    send(replies, text);
    for (;;) {
      const message = receive(answers);
      if (message.type === 'returned' || message.type === 'threw') return message;
      send(replies, respond(message));
    }
  },
};
let lookup;
let declared;
const respond = (message) => {
  if (message.type === 'call') return serve(message);
  if (message.type === 'name') return answer(() => lookup(message.name));
  // The reading of this message is still listed.
  const isIdle = resources().filter((kind) => kind !== 'PipeWrap').length <= 1;
  return pack('state', { isIdle, declared });
};
const die = (kind, detail) => {
  try { send(replies, pack('died', { kind, detail })); } finally { exit(1); }
};
const dieOf = (error) => die(isAssertion(error) ? 'failed_tests' : 'raised', describeError(error));
process.on('uncaughtExceptionMonitor', dieOf);

// Its output belongs to the tests, which may look at it.
for (const name of ['log', 'info', 'debug', 'warn', 'error'])
  console[name] = (...given) => { ask('console', { name }, given); };

const readRequest = () => {
  const readAll = (bytes, n, then) => read(requests, bytes, n, bytes.length - n, null,
    (error, more) => {
      if (error || more === 0) exit(0);
      if (n + more < bytes.length) readAll(bytes, n + more, then); else then(bytes);
    });
  readAll(Buffer.alloc(8), 0, (head) => readAll(Buffer.alloc(sizeOf(head)), 0, (bytes) => {
    const message = parse(bytes.toString());
    send(replies, respond({ ...message, given: unpack(message) }));
    readRequest();
  }));
};
readRequest();

// A program of its own, or one that the prefix opens.
const own = prefix.trim() !== '' && said.includes(prefix.trim());
const texts = own ? [said] : [prefix + said, said];
const complete = texts.find((text) => !strip(text).error);
if (complete === undefined) die('did_not_parse', strip(texts[0]).error);
const { js, error } = strip(withoutUnused(complete));
if (error) die('did_not_parse', error);
const KEY = '#lookup';
load(`${js}\n;globalThis['${KEY}'] = (name) => eval(name);`).then(() => {
  lookup = globalThis[KEY];
  delete globalThis[KEY];
  declared = [...new Set(js.match(/[\p{ID_Start}$_][\p{ID_Continue}$]*/gu))].filter((name) => {
    try { return !(name in globalThis) || lookup(name) !== globalThis[name]; }
    catch { return false; }
  });
}).catch(dieOf);
})();
"""
)
