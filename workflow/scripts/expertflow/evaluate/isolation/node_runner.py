"""JavaScript that runs inside the sandbox, strips types, runs the tests and reports.

It reads 32 characters, the proof, and ``{prefix, said, tests}`` from stdin, and writes lines
``proof {kind, detail}``. The program shares its process, so nothing here can be proven; known ways
to forge a verdict are closed. The proof is kept as bytes outside of V8's heap, where no snapshot
shows it. ``passed`` is reported when nothing is left to run, and any failure ends the process at
once with an exit code that no listener can change.
"""

RUNNER = r"""
'use strict';
(() => {
  const { readFileSync, readSync, writeSync } = require('fs');
  const modules = require('module');
  const { isBuiltin, stripTypeScriptTypes } = modules;
  const { stringify } = JSON;
  const exit = process.reallyExit.bind(process);
  const resources = process.getActiveResourcesInfo.bind(process);
  // The pipe of stdin and stdout is always listed.
  const isOpen = () => {
    const open = resources();
    for (let n = 0; n < open.length; n++) if (open[n] !== 'PipeWrap') return true;
    return false;
  };
  const soon = setImmediate;
  const apply = Reflect.apply;

  // Its length is its own, as what it inherits is the program's to change.
  const proof = Object.defineProperty(Buffer.alloc(34, ' '), 'byteLength', { value: 34 });
  proof[0] = 10;
  for (let n = 0; n < 32;) n += readSync(0, proof, 1 + n, 32 - n);
  const { prefix, said, tests } = JSON.parse(readFileSync(0, 'utf8'));
  const say = (kind, detail = '') => {
    writeSync(1, proof, 0, 34);
    writeSync(1, `{"kind":"${kind}","detail":${stringify(detail)}}\n`);
  };
  const fail = (kind, detail) => { try { say(kind, detail); } finally { exit(1); } };
  const attempt = (code) => {
    try { return { js: stripTypeScriptTypes(code, { mode: 'transform' }) }; }
    catch (error) { return { error: message(error) }; }
  };
  const message = (error) => {
    try {
      const text = `${error?.name ?? typeof error}: ${error?.message ?? error}`;
      return text.replace(/data:text\/javascript;base64,[\w+\/=]*/g, 'the program').slice(0, 300);
    } catch { return 'an error that cannot be read'; }
  };
  const IMPORT =
    /^import\b((?:[\w$*, ]|\{[\w$,\s]*\})+?)(?<![\w$])from *['"]([^'"\n]+)['"] *;?/gm;
  const quoted = (name) => name.replace(/\$/g, '\\$');
  const wordsOf = (bound) =>
    (bound.match(/[\w$]+/g) ?? []).filter((word) => !['as', 'type'].includes(word));
  const boundBy = (bound) => wordsOf(bound.replace(/(?:\*|[\w$]+)\s+as\s+/g, ''));
  const failed = (error) => {
    let kind = 'raised';
    try { if (error?.code === 'ERR_ASSERTION') kind = 'failed_tests'; } catch { /* a trap */ }
    fail(kind, message(error));
  };
  // As TypeScript does, leave out what is imported and never named: it may not be installed.
  const withoutUnused = (code) => code.replace(IMPORT, (whole, bound, source) => {
    const naming = (name) => new RegExp(`(?<![\\w$])${quoted(name)}(?![\\w$])`);
    const named = (name) => code.split(naming(name)).length > 2;
    return isBuiltin(source) || wordsOf(bound).some(named) ? whole : '';
  });
  // What both import would be declared twice; the tests' own import stays.
  const shared = new Set([...tests.matchAll(IMPORT)].flatMap(([, bound]) => boundBy(bound)));
  const withoutShared = (code) => code.replace(IMPORT, (whole, bound, source) =>
    isBuiltin(source) && boundBy(bound).every((name) => shared.has(name)) ? '' : whole);

  say('started');
  const ofTests = attempt(tests);
  if (ofTests.error) { say('tests_did_not_parse', ofTests.error); return; }
  // A program of its own, or one that the prefix opens. It must be complete without the tests: an
  // open comment or text would swallow them.
  const own = prefix.trim() !== '' && said.includes(prefix.trim());
  const texts = own ? [said] : [prefix + said, said];
  const complete = texts.find((text) => !attempt(text).error);
  if (complete === undefined) { say('did_not_parse', attempt(texts[0]).error); return; }
  // A call of their own async function is awaited: it may wait for what never comes.
  const waiting = tests.replace(/^\(async\b/gm, 'await (async');
  const told = attempt(waiting).error ? tests : waiting;
  const { js, error } = attempt(withoutUnused(`${withoutShared(complete)}\n;\n${told}`));
  if (error) { say('did_not_parse', error); return; }
  say('parsed');

  // What judges the program is not the program's to change.
  const locked = (of, name, value) =>
    Object.defineProperty(of, name, { value, writable: false, configurable: false });
  const assert = require('assert');
  for (const part of [assert, assert.strict, assert.AssertionError]) Object.freeze(part);
  if (/['"]node:test['"]/.test(tests)) Object.freeze(require('node:test'));
  const v8 = require('v8');
  for (const name of ['getHeapSnapshot', 'writeHeapSnapshot', 'queryObjects', 'setFlagsFromString'])
    v8[name] = undefined;
  modules.syncBuiltinESMExports();
  modules.syncBuiltinESMExports = undefined;

  // Node looks these up on the process at each event, with no listener in between.
  let imported = false;
  let passed = false;
  // What is listed without keeping Node alive would be waited for without end.
  const MOST_ASKED = 20;
  let nAsked = 0;
  const { emit, rawListeners } = process;
  const checkCode = () => {
    if (process.exitCode) fail('failed_tests', `exit code ${process.exitCode}`);
  };
  locked(process, 'emit', function (name, ...rest) {
    if (name === 'uncaughtExceptionMonitor' || name === 'unhandledRejection') failed(rest[0]);
    if (name !== 'beforeExit' && name !== 'exit') return apply(emit, process, [name, ...rest]);
    // After each listener, as the next may take back the code that node:test sets.
    const heard = apply(rawListeners, process, [name]);
    for (let n = 0; n < heard.length; n++) {
      apply(heard[n], process, rest);
      checkCode();
    }
    checkCode();
    // The program can call this too: only if nothing else is open is it the end.
    if (name === 'beforeExit' && imported && !passed && nAsked++ < MOST_ASKED) soon(() => {
      checkCode();
      if (passed || isOpen()) return;
      passed = true;
      say('passed');
    });
    return heard.length > 0;
  });
  // A domain would be told of rejections in the place of the process.
  locked(process, 'domain', undefined);
  locked(process, 'reallyExit', (code) => fail('ended_early', `code ${code}`));
  import('data:text/javascript;base64,' + Buffer.from(js).toString('base64')).then(
    () => { imported = true; },
    failed,
  );
})();
"""
