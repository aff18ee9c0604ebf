"""Command lines without the secrets in them: they go into evidence, reports and logs, and from there anywhere.

What secrets look like is data, in secret_patterns.py. Everything here is linear in the length of a text, which is
bounded, whatever it holds: it may be somebody else's.
"""

import re
from collections.abc import Sequence
from functools import cache

from holdfast.system import secret_patterns as known

HIDDEN = "***"
# Letters that are looked at, and shown; whole scripts stand on command lines.
_MOST = 4096
_ENDS = ("|", "||", "&&", "&", ";")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_NAMES = known.NAMES
_WORDS = tuple(f"-{word}" for word in known.WORDS)
_HARMLESS = tuple(f"-{name}" for name in known.HARMLESS)
# The shell's own variables: where it is, and was.
_PLACES = ("PWD", "OLDPWD")
# -phunter2: letters and figures, and nothing that ports, numbers and paths are made of.
_GLUED = re.compile(r"-p(?=[^\d]*\d)(?=[^A-Za-z]*[A-Za-z])[^\s/=:,.\"']{5,}")
# PASSWORD=x, api_key=x, -Dspark.secret=x, "token": x, os.environ["TOKEN"]=x, ...?key=x&sig=y
_NAME = re.compile(r"(?<![\w.-])([\w.-]++)[\"']?\]?(?:=|:\s?)")
_VALUE = re.compile(r"\"[^\"]*\"|'[^']*'|[^\s&;,]+")
# scheme://user:password@host
_IN_URL = re.compile(r"(?<=://)[^\s/]+@")
# Authorization: Bearer x; with what else may stand there
_HEADER = re.compile(
    rf"(?i)\b(authorization[\"']?[:=]\s?[\"']?(?:(?:{'|'.join(known.SCHEMES)})\s)?)[^\s\"']+|"
    r"\b(cookie[\"']?:\s?[\"']?)(?:[^\s;\"']+;\s?)*+[^\s;\"']*|"
    r"\b((?:bearer|basic)\s)[\w.~+/=-]{8,}+"
)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY.*?(?:-----END [^-]{0,60}-----|\Z)", re.DOTALL)


def mask(command: str) -> str:
    """The same on one line; what looks like a secret is replaced. Rather one too many than one too few.

    Arguments may be divided by NUL, as the kernel has them: then one is hidden whole, with the spaces in it.
    """
    text = _PRIVATE_KEY.sub(HIDDEN, command[:_MOST])
    if "\0" in text:
        text = " ".join(_hide_values(text.split("\0")))
    text = " ".join(_hide_values(text.split()))
    text = _HEADER.sub(lambda found: f"{found[1] or found[2] or found[3]}{HIDDEN}", text)
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
    before = found.string[max(0, found.start() - 1) : found.start()]
    return _is_secret(found[1]) or (before in ("", " ", "?", "&", ";") and found[1].lower() in known.PARAMETERS)


# Options --------------------------------------------------------------------------------------------------------------


@cache
def _options() -> dict[str, tuple[frozenset[str], frozenset[str]]]:
    """By program: options whose next word is a secret, and letters that one is glued to."""
    rows = [(name, ahead, glued) for names, ahead, glued in known.OPTIONS for name in names.split()]
    rows += [(f"{name} login", ahead, glued) for names, ahead, glued in known.LOGINS for name in names.split()]
    return {name: (frozenset(ahead.split()), frozenset(glued.split())) for name, ahead, glued in rows}


_NONE: tuple[frozenset[str], frozenset[str]] = frozenset(), frozenset()


def _hide_values(words: Sequence[str]) -> list[str]:
    """Values of options, by the names of these and by the program that they belong to."""
    shown: list[str] = []
    program, options, at = "", _NONE, 0
    while at < len(words):
        word = words[at]
        at += 1
        name = word.rpartition("/")[2].strip("\"'")
        if word in _ENDS or word.endswith(";"):
            program, options = "", _NONE
        elif name in _options() or f"{name} login" in _options():
            program, options = name, _options().get(name, _NONE)
        elif f"{program} {name}" in _options():
            options = _options()[f"{program} {name}"]
        elif "*" in options[0] and not word.startswith("-"):
            shown.append(HIDDEN)
            continue
        told, ahead = _read(word, *options)
        shown.append(told)
        if told != word:
            at = _end_of_value(word[len(told) - len(HIDDEN) :], words, at)
        if ahead and at < len(words):
            at = _end_of_value(words[at], words, at + 1)
            shown.append(HIDDEN)
    return shown


def _read(word: str, ahead: frozenset[str], glued: frozenset[str]) -> tuple[str, bool]:
    """The word as it is shown, and whether the next one is a secret."""
    name, equals, value = word.partition("=")
    if not word.startswith("-"):
        whole = equals and value and name.isupper() and name.isidentifier() and _is_secret(name)
        return (f"{name}={HIDDEN}", False) if whole and name not in _PLACES else (word, word in ahead)
    if equals and value and (name in ahead or _is_secret(name)):
        return f"{name}={HIDDEN}", False
    if word in ahead:
        return word, True
    if word[:2] in glued and len(word) > 2:  # -psecret; but it may be an option of this name
        return f"{word[:2]}{HIDDEN}", not equals and _is_secret(word)
    if not equals and _is_secret(word):
        return word, True
    if f"-{word[-1]}" in ahead and len(word) < 6 and word[1:].isalpha():
        return word, True  # curl -sSu
    if _GLUED.fullmatch(word) and not word.startswith(known.NO_PASSWORDS):
        return f"-p{HIDDEN}", False
    return word, False


def _end_of_value(value: str, words: Sequence[str], at: int) -> int:
    """Behind the value that begins so, before the word at this place; in quotes it may be several words."""
    quote = value[:1]
    if quote in ('"', "'") and not (len(value) > 1 and value.endswith(quote)):
        return next((end + 1 for end in range(at, len(words)) if words[end].endswith(quote)), at)
    return at
