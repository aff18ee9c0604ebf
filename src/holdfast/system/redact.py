"""Command lines without the secrets in them: they go into evidence, reports and logs, and from there anywhere.

What secrets look like is data, in secret_patterns.py. Everything here is linear in the length of a text, which is
bounded, whatever it holds: it may be somebody else's.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from holdfast.system import secret_patterns as known

HIDDEN = "***"
# Letters that are looked at, and shown; whole scripts stand on command lines.
MOST = 16_384
_ENDS = ("|", "||", "&&", "&", ";")
# Behind these a shell expects a command, also in the middle of a word.
_SIGNS = ";|&(`"
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_NAMES = known.NAMES
_WORDS = tuple(f"-{word}" for word in known.WORDS)
_HARMLESS = tuple(f"-{name}" for name in known.HARMLESS)
# The shell's own variables: where it is, and was.
_PLACES = ("PWD", "OLDPWD")
# -phunter2: letters and figures, and nothing that ports, numbers and paths are made of.
_GLUED = re.compile(r"-p(?=[^\d]*\d)(?=[^A-Za-z]*[A-Za-z])[^\s/=:,.\"']{5,}")
# PASSWORD=x, api_key=x, -Dspark.secret=x, "token": x, os.environ["TOKEN"]=x, ...?key=x&sig=y
# With spaces around the sign: what a program compares or calls is no secret, text in quotes is one.
_NAME = re.compile(
    r"(?<![\w.-])([\w.-]++)[\"']?\]?"
    r"(=\s(?=[\"'])|:=\s?|=|:\s?|\s(?:=>|:=|==?|:)\s?(?=[\"'])|\s(?:=>|:=|=)\s?(?![=~]|[A-Za-z_][\w.]*+[(\[]))"
)
_VALUE = re.compile(r"\"(?:[^\"\\]|\\.)*+\"|'(?:[^'\\]|\\.)*+'|\*{3}(?=[}\])])|[^\s&;,]+")
# scheme://user:password@host
_IN_URL = re.compile(r"(?<=://)[^\s/]+@")
# Authorization: Bearer x; with what else may stand there
_SCHEME = rf"(?:(?:{'|'.join(known.SCHEMES)})\s)?"
_HEADER = re.compile(
    rf"(?i)(?:\b|(?<=-H))(authorization[\"']?\s?[:=]\s?[\"']?{_SCHEME})[^\s\"']+|"
    r"(?:\b|(?<=-H))(cookie[\"']?:\s?[\"']?)(?:[^\s;\"']+;\s?)*+[^\s;\"']*|"
    r"\b((?:bearer|basic)\s)[\w.~+/=-]{8,}+"
)
# The same as an argument of its own, or in quotes: it is clear where it ends, whatever the scheme.
_WHOLE_HEADER = re.compile(
    r"(?i)((?:[\0\"'](?:-H\s?|--header=)?(?:proxy-)?authorization:|"
    rf"\bauthorization[\"']\]?\s?[:=]\s?[\"'])\s?{_SCHEME})[^\0\"'\s][^\0\"']*"
)
# echo x | docker login --password-stdin
_PIPED = re.compile(r"\b((?:echo|printf)\s)[^|;&]{1,200}+(?=\|[^|;&]{0,200}--(?:password-stdin|with-token))")
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY.*?(?:-----END [^-]{0,60}-----|\Z)", re.DOTALL)


def mask(command: str) -> str:
    """The same on one line; what looks like a secret is replaced. Rather one too many than one too few.

    Arguments may be divided by NUL, as the kernel has them: then one is hidden whole, with the spaces in it.
    """
    text = _PRIVATE_KEY.sub(HIDDEN, command[:MOST])
    text = _WHOLE_HEADER.sub(lambda found: f"{found[1]}{HIDDEN}", text)
    if "\0" in text:
        text = " ".join(_hide_values(text.split("\0")))
    text = " ".join(_hide_values(text.split()))
    text = _HEADER.sub(lambda found: f"{found[1] or found[2] or found[3]}{HIDDEN}", text)
    text = _PIPED.sub(lambda found: f"{found[1]}{HIDDEN} ", text)
    text = _IN_URL.sub(f"{HIDDEN}@", text)
    text = _hide_fields(text)
    return _tokens().sub(HIDDEN, text)


@cache
def _tokens() -> re.Pattern[str]:
    kinds = (
        f"(?:{'|'.join(map(re.escape, begins.split()))}){letters}{{{least},}}+"
        for _, begins, letters, least in known.TOKENS
    )
    return re.compile(rf"(?<![0-9A-Za-z])(?:{'|'.join(kinds)})")


def _is_secret(name: str) -> bool:
    """A name of an option, a variable or a field."""
    name = "-" + _CAMEL.sub("-", name).lower().replace("_", "-").replace(".", "-").lstrip("-")
    return name != "-key" and name.endswith((*_NAMES, *_WORDS)) and not name.endswith(_HARMLESS)


def _hide_fields(text: str) -> str:
    """Values behind an equals sign or a colon. What is no secret may hold one: an address with parameters."""
    shown, at = [], 0
    for found in _NAME.finditer(text):
        if found.start() < at or not _is_field(found):
            continue
        value = _VALUE.match(text, found.end())
        if value is not None and not (found[1] in _PLACES and value[0].startswith("/")):
            shown += [text[at : found.end()], HIDDEN]
            at = value.end()
    return "".join((*shown, text[at:]))


def _is_field(found: re.Match[str]) -> bool:
    if _is_secret(found[1]):
        return True
    before = found.string[max(0, found.start() - 1) : found.start()]
    close = not found[2].startswith(" ")
    return close and before in ("", " ", "?", "&", ";") and found[1].lower() in known.PARAMETERS


# Options --------------------------------------------------------------------------------------------------------------


class _Options(NamedTuple):
    """A program's: those whose next word is a secret, those that one is glued to, and letters that may stand before."""

    ahead: frozenset[str] = frozenset()
    glued: frozenset[str] = frozenset()
    flags: str = ""


_NONE = _Options()


@cache
def _options() -> dict[str, _Options]:
    rows = [(name, *rest) for names, *rest in known.OPTIONS for name in names.split()]
    rows += [(f"{name} login", *rest) for names, *rest in known.LOGINS for name in names.split()]
    return {
        name: _Options(frozenset(ahead.split()), frozenset(glued.split()), *flags)
        for name, ahead, glued, *flags in rows
    }


class _Shell:
    """Whose the words are that come: the last program's, as far as the shell's signs go."""

    def __init__(self) -> None:
        self.options = _NONE
        self._program = ""
        # Those that wait for the one in brackets or backticks.
        self._outer: list[tuple[str, _Options, bool]] = []

    def follow(self, word: str, ends: bool) -> bool:
        """Whether the word is the name of a program, and nothing else. `ends`: a semicolon behind it ends a command."""
        opened = word.count("(") - word.count(")")
        for _ in range(opened):
            self._outer.append((self._program, self.options, False))
        for _ in range(min(-opened, len(self._outer))):
            self._leave()
        if word.count("`") % 2:
            if self._outer and self._outer[-1][2]:
                self._leave()
            else:
                self._outer.append((self._program, self.options, True))
        begin = max(map(word.rfind, _SIGNS)) + 1
        name = word[begin:].rpartition("/")[2].strip("\"'")
        if word in _ENDS or (ends and word.endswith(";")):
            self._program, self.options = "", _NONE
        elif name in _options() or f"{name} login" in _options():
            self._program, self.options = name, _options().get(name, _NONE)
            return begin == 0
        elif f"{self._program} {name}" in _options():
            self.options = _options()[f"{self._program} {name}"]
            return begin == 0
        return word in _ENDS

    def _leave(self) -> None:
        self._program, self.options, _ = self._outer.pop()


def _hide_values(words: Sequence[str]) -> list[str]:
    """Values of options, by the names of these and by the program that they belong to."""
    shown: list[str] = []
    place, at = _Shell(), 0
    while at < len(words):
        word, options = words[at], place.options
        at += 1
        named = place.follow(word, ends=True)
        if "*" in options.ahead and not named and not word.startswith("-"):
            shown.append(f"{HIDDEN};" if ";" in word else HIDDEN)
            continue
        told, ahead = _read(word, options)
        shown.append(told)
        value = at
        if told != word:
            at = _end_of_value(word[len(told) - len(HIDDEN) :], words, at)
        if ahead and at < len(words):
            at = _end_of_value(words[at], words, at + 1)
            shown.append(HIDDEN)
        for hidden in words[value:at]:
            place.follow(hidden, ends=False)
    return shown


def _read(word: str, options: _Options) -> tuple[str, bool]:
    """The word as it is shown, and whether the next one is a secret."""
    ahead, glued, flags = options
    name, equals, value = word.partition("=")
    if not word.startswith("-"):
        whole = equals and value and name.isupper() and name.isidentifier() and _is_secret(name)
        if whole and name not in _PLACES:
            return f"{name}={HIDDEN}", False
        return word, word[max(word.rfind("."), word.rfind(":")) + 1 :] in ahead  # profile.x.aws_session_token
    if equals and value and (name in ahead or _is_secret(name)):
        return f"{name}={HIDDEN}", False
    if word in ahead:
        return word, True
    end = len(word) - len(word[1:].lstrip(flags)) + 1  # -sLu: behind the letter that takes a value
    if f"-{word[end - 1 : end]}" in glued and len(word) > end:  # -psecret; but it may be an option of this name
        return f"{word[:end]}{HIDDEN}", not equals and _is_secret(word)
    if not equals and _is_secret(word):
        return word, True
    if f"-{word[-1]}" in ahead and (len(word) < 6 or len(word) == end) and word[1:].isalpha():
        return word, True  # curl -sSu
    if _GLUED.fullmatch(word) and not word.startswith(known.NO_PASSWORDS):
        return f"-p{HIDDEN}", False
    return word, False


def _end_of_value(value: str, words: Sequence[str], at: int) -> int:
    """Behind the value that begins so, before the word at this place; in quotes it may be several words."""
    quote = value[:1]
    if quote in ('"', "'") and not _closes(quote, value[1:]):
        return next((end + 1 for end in range(at, len(words)) if _closes(quote, words[end])), at)
    return at


def _closes(quote: str, word: str) -> bool:
    return quote in word.replace(f"\\{quote}", "")
