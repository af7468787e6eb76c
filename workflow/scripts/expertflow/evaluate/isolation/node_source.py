"""JavaScript that strips types from TypeScript, prepares imports, loads a module, words errors."""

SOURCE = r"""
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
"""
