"""JavaScript for the process that runs a program and never sees its tests.

Nothing here is safe from the program: it only answers for it.
"""

from expertflow.evaluate.isolation.node_link import LINK

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
