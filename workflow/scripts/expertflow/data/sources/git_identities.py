"""Hide who wrote a history: contributors by number, their names and addresses in texts.

Hidden are the author; names in trailers such as Co-authored-by; in messages the names of known
contributors (of a single word only when it has a capital: "Julian", but not "test"); in diffs and
paths names of two words or more; everywhere e-mail addresses. Known are all authors, committers
and signers in the whole history that is walked, whatever is selected.

Not caught: nicknames ("@ann"), single names in diffs, names in another spelling or case or broken
over two lines, people who are no contributors, names of branches and tags, and whatever the code
itself tells about its authors.
"""

import re

from expertflow.data.secrets import replace_emails
from expertflow.data.sources.git_objects import Commit, Person

NAME_CHARS = 200
_TRAILER = re.compile(r"^([A-Za-z][A-Za-z-]*-by):([^<\n]*)<([^>\n]*)>", re.MULTILINE)
_WORD = re.compile(r"\w+")
# The address of the site itself as a committer, when somebody merges there.
_SITES = {"noreply@github.com"}


class Contributors:
    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        # By first word: the lengths of the names that begin with it, longest first, and the names.
        self._names: dict[str, tuple[list[int], dict[str, str]]] = {}

    def meet(self, commit: Commit) -> None:
        self._add(commit.author)
        if commit.committer.e_mail.lower() not in _SITES:
            self._add(commit.committer)
        for _, name, e_mail in _TRAILER.findall(commit.message):
            self._add(Person(name.strip(), e_mail.strip()))

    def label(self, person: Person) -> str | None:
        number = self._numbers.get(_key(person))
        return f"Contributor {number}" if number else None

    def hide(self, text: str, *, is_message: bool = False) -> str:
        if is_message:
            text = _TRAILER.sub(self._hide_trailer, text)
        return self._hide_names(replace_emails(text), is_message=is_message)

    def _hide_trailer(self, match: re.Match[str]) -> str:
        person = Person(match[2].strip(), match[3].strip())
        return f"{match[1]}: {self.label(person) or 'somebody'}"

    def _hide_names(self, text: str, *, is_message: bool) -> str:
        parts: list[str] = []
        done = 0
        for word in _WORD.finditer(text):
            if word.start() < done or word[0] not in self._names:
                continue
            lengths, names = self._names[word[0]]
            for length in lengths:
                end = word.start() + length
                name = text[word.start() : end]
                if name not in names or _WORD.match(text, end):
                    continue
                if is_message or " " in name:
                    parts += (text[done : word.start()], names[name])
                    done = end
                    break
        return "".join((*parts, text[done:]))

    def _add(self, person: Person) -> None:
        key = _key(person)
        if not key:
            return
        number = self._numbers.setdefault(key, len(self._numbers) + 1)
        name = person.name.lstrip("\"'([<-. ")[:NAME_CHARS].rstrip("\"')]>. ")
        first = _WORD.match(name)
        if first is None or len(name) < 3 or (" " not in name and name == name.lower()):
            return
        lengths, names = self._names.setdefault(first[0], ([], {}))
        names.setdefault(name, f"Contributor {number}")
        if len(name) not in lengths:
            lengths.append(len(name))
            lengths.sort(reverse=True)


def _key(person: Person) -> str:
    return (person.e_mail or person.name).lower()
