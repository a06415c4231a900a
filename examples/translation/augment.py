"""What parallel text lacks, made from it: other case, missing punctuation, and strings that a translation must copy.

Every function gives pairs that are as right as the pairs they are made from: a string goes only where its place in the
translation is sure, which is at the ends of a line, in a template, or where the same name or number stands on both
sides.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import NamedTuple
from uuid import UUID


class Pair(NamedTuple):
    source: str
    target: str
    origin: str  # as in train.src


# -- case and punctuation

_MARKUP = re.compile(r"[%{}<>@\\_=$|~^`\[\]/&]|\w\.\w|\b(?:sth|sb|etw|jd[mns]?)\.")  # more than words
_QUESTION = re.compile(
    r"(?:who|whose|what|where|when|why|how|which|is|are|am|was|were|do|does|did|can|could|will|would|shall|should|may|must"
    r"|have|has|had|isn't|aren't|don't|doesn't|didn't|can't|won't|wouldn't)\b",
    re.IGNORECASE,
)


def is_words(pair: Pair) -> bool:
    return not (_MARKUP.search(pair.source) or _MARKUP.search(pair.target))


def upper(pair: Pair) -> Pair | None:
    made = pair.source.upper(), pair.target.upper()
    return Pair(*made, "caps") if is_words(pair) and made != pair[:2] else None


def lower(pair: Pair) -> Pair | None:
    """Who types without capitals wants a translation with them: German has more use for them than English."""
    made = pair.source.lower()
    return Pair(made, pair.target, "lower") if is_words(pair) and made != pair.source else None


def without_question_mark(pair: Pair) -> Pair | None:
    """Only where the words alone ask; the translation keeps its mark."""
    asks = pair.source.endswith("?") and pair.target.endswith("?") and _QUESTION.match(pair.source)
    return Pair(pair.source[:-1].rstrip(), pair.target, "unmarked") if asks and is_words(pair) else None


def without_full_stop(pair: Pair) -> Pair | None:
    ends = all(text.endswith(".") and not text.endswith("..") for text in pair[:2])
    return Pair(pair.source[:-1], pair.target[:-1], "unmarked") if ends and is_words(pair) else None


# -- strings to copy


def _words(text: str) -> list[str]:
    return text.split()


_MEN = _words(
    "Ben David Felix Jonas Karl Max Otto Paul Simon Uwe Yusuf Noah Liam Ahmed Ivan Pierre José Søren Raj Peter Lukas "
    "Erik"
)
_WOMEN = _words(
    "Anna Clara Emma Greta Hannah Ines Lena Nina Rosa Tina Vera Zoe Mia Olivia Fatima Yuki Olga Giulia Zoë Siobhán "
    "Priya Julia"
)
_CITIES = _words(
    "Hamburg Leipzig Dresden London Paris Oslo Lima Chicago Toronto Sydney Kyoto Nairobi Madrid Porto Bern Graz Linz "
    "Riga Delhi Dublin Boston Dallas Seoul"
)
_WORDS = _words(
    "alpha beta data file user test main index report image photo backup config server client admin project team "
    "north south green blue river stone apple lemon tiger falcon home page blog shop news list item order cart login "
    "search help docs api static assets public build release draft final copy notes music video game level score map "
    "local lib bin share etc var opt src tmp log cache core base common module package plugin account profile contact "
    "support sales office info service system network device storage cloud mail inbox store product category tag "
    "archive press jobs event calendar status health debug dev stage prod version branch master origin remote feature "
    "fix merge tree node root child parent first last next open close start stop read write load save new old reply no "
    "yes black white red yellow summer winter garden house window door street city world school water friend book "
    "story camel case type class object string number value key size width height color left right top bottom"
)
_DOMAINS = _words(
    "example.com example.org example.net example.de test.org mysite.io shop.eu my-company.com uni-stadt.de a1b2.net"
)
_DOTS = _words("com org net de io eu")
_ENTITIES = _words("amp lt gt quot nbsp copy ndash hellip")
_FIELDS = _words(
    "name user count total file path size date time title id value key email number url price amount n i message error"
)
_TAGS = _words("b i u p em strong code span div li h1 h2 td br hr a sub pre small")
_ENDINGS = _words("txt md py json yml csv png jpg pdf zip tar.gz so.1 html cpp sh docx mp3 toml log ini")
_COMMANDS = _words("ls cd git pip sudo apt make grep curl python npm docker ssh cat tail chmod")
_SCRIPTS = (
    "абвгдежзийклмнопрстуфхцчшщыьэюя",
    "αβγδεζηθικλμνξοπρστυφχψωάέήίόύώ",
    "אבגדהוזחטיכלמנסעפצקרשתםןץ",
    "ابتثجحخدذرزسشصضطظعغفقكلمنهوي",
    "あいうえおかきくけこさしすせそたちつてとなにぬねのはひふへほまみむめもやゆよらりるれろわをん",
    "アイウエオカキクケコサシスセソタチツテトナニヌネノハヒフヘホマミムメモヤユヨラリルレロワン",
    "कखगघचछजझटठडढतथदधनपफबभमयरलवशसह",
    "กขคงจชซดตถทนบปผพฟมยรลวสหอ",
)
_EMOJI_RANGES = ((0x1F600, 0x1F64F), (0x1F300, 0x1F5FF), (0x1F680, 0x1F6C5), (0x1F90C, 0x1F9FF), (0x2600, 0x26FF))
_COMMON_EMOJI = "😀😂😊😍😉😎🤔😢👍👏🙏👋🎉🔥✨✅❌❤💡🚀🌍☕🐱🐶⭐"


def number(random: Random) -> str:
    digits = str(random.randrange(10 ** random.randint(1, 6)))
    ways: list[Callable[[], str]] = [
        lambda: digits,
        lambda: digits,
        lambda: f"{random.randrange(1, 1000)},{random.randrange(1000):03}",
        lambda: f"{random.randrange(1, 100)},{random.randrange(1000):03},{random.randrange(1000):03}",
        lambda: f"{random.randrange(1000)}.{random.randrange(10 ** random.randint(1, 4))}",
        lambda: f"-{digits}",
        lambda: f"{random.randrange(101)}%",
        lambda: f"{random.randrange(1, 32):02}.{random.randrange(1, 13):02}.{random.randrange(1900, 2100)}",
        lambda: f"{random.randrange(1900, 2100)}-{random.randrange(1, 13):02}-{random.randrange(1, 32):02}",
        lambda: f"{random.randrange(24)}:{random.randrange(60):02}",
        lambda: f"+{random.randrange(1, 99)} {random.randrange(10, 999)} {random.randrange(10**4, 10**7)}",
        lambda: f"0{random.randrange(10, 999)} {random.randrange(10**4, 10**7)}",
        lambda: ".".join(str(random.randrange(256)) for _ in range(4)),
        lambda: f"v{random.randrange(20)}.{random.randrange(30)}.{random.randrange(20)}",
        lambda: f"{random.randrange(20)}.{random.randrange(30)}",
        lambda: f"{random.randrange(1, 100)}/{random.randrange(1, 100)}",
        lambda: f"{random.randrange(1, 10)}e-{random.randrange(1, 12)}",
        lambda: f"0x{random.randrange(16**8):X}",
        lambda: f"#{random.randrange(16**6):06X}",
        lambda: f"{random.getrandbits(32):08x}-{random.getrandbits(16):04x}-{random.getrandbits(16):04x}",
        lambda: str(UUID(int=random.getrandbits(128))),
        lambda: f"{random.getrandbits(64):x}",
        lambda: " ".join(f"{random.randrange(10**4):04}" for _ in range(random.randint(2, 5))),
        lambda: (
            "".join(random.choices("ABCDEFGHKLMNPRSTUVWXYZ", k=random.randint(1, 3)))
            + random.choice(["", " ", "-"])
            + digits
        ),
    ]
    return random.choice(ways)()


def _word(random: Random) -> str:
    return (
        random.choice(_WORDS)
        if random.random() < 0.7
        else "".join(random.choices("abcdefghiklmnoprstuvwxyz", k=random.randint(2, 8)))
    )


def address(random: Random) -> str:
    """A URL, an e-mail address, or what looks like them."""
    domain = random.choice(_DOMAINS) if random.random() < 0.5 else f"{_word(random)}.{random.choice(_DOTS)}"
    mailbox = random.choice(
        [
            _word(random),
            f"{_word(random)}.{_word(random)}",
            f"{_word(random)}-{_word(random)}",
            f"{_word(random)}{random.randrange(100)}",
        ]
    )
    path = "".join(f"/{_word(random)}" for _ in range(random.randint(0, 3)))
    ways: list[Callable[[], str]] = [
        lambda: f"https://{domain}{path}",
        lambda: f"https://www.{domain}{path}",
        lambda: f"http://{domain}:{random.randrange(80, 9999)}{path}",
        lambda: f"https://{domain}{path}/{_word(random)}.{random.choice(_ENDINGS)}",
        lambda: f"https://{domain}{path}?{_word(random)}={_word(random)}&{_word(random)}={random.randrange(100)}",
        lambda: f"https://{domain}{path}#{_word(random)}",
        lambda: f"ftp://{domain}{path}/",
        lambda: f"www.{domain}",
        lambda: f"{domain}{path}",
        lambda: f"{mailbox}@{domain}",
        lambda: f"{mailbox}@{domain}",
        lambda: f"{mailbox}+{_word(random)}@{domain}",
        lambda: f"mailto:{mailbox}@{domain}",
        lambda: f"git@{domain}:{_word(random)}/{_word(random)}.git",
        lambda: f"@{_word(random)}",
        lambda: f"#{_word(random)}",
    ]
    return random.choice(ways)()


def placeholder(random: Random) -> str:
    name = random.choice(_FIELDS)
    return random.choice(
        [
            "%s",
            "%s",
            "%d",
            "%i",
            "%u",
            "%ld",
            "%%",
            f"%{random.randint(1, 3)}$s",
            f"%{random.randint(1, 3)}$d",
            f"%.{random.randint(1, 3)}f",
            f"%({name})s",
            f"%({name})d",
            f"%{random.randint(1, 3)}",
            f"{{{name}}}",
            f"{{{name}}}",
            f"{{{random.randrange(4)}}}",
            f"{{{{{name}}}}}",
            f"{{{{ {name} }}}}",
            f"${{{name}}}",
            f"${name.upper()}",
            f"${name}",
            f":{name}",
            f"%{name.upper()}%",
            f"[{name}]",
            f"<{name}>",
        ]
    )


def tag(random: Random) -> str:
    name = random.choice(_TAGS)
    return random.choice(
        [
            f"<{name}>",
            f"</{name}>",
            f"<{name}/>",
            f'<{name} class="{_word(random)}">',
            f'<{name} id="{_word(random)}">',
            f'<a href="https://{random.choice(_DOMAINS)}">',
            f'<img src="{_word(random)}.png" alt="">',
            f"<{name}></{name}>",
            f"&{random.choice(_ENTITIES)};",
            f"[{random.randrange(1, 100)}]",
            f"**{_word(random)}**",
            f"`{_word(random)}`",
        ]
    )


def name_of_a_thing(random: Random) -> str:
    """Files, commands, identifiers, formulas."""
    one, two = _word(random), _word(random)
    return random.choice(
        [
            f"{one}.{random.choice(_ENDINGS)}",
            f"{one}_{two}.{random.choice(_ENDINGS)}",
            f"/{one}/{two}/{_word(random)}",
            f"../{one}/{two}.{random.choice(_ENDINGS)}",
            f"~/.{one}",
            f"C:\\{one.title()}\\{two}",
            f"--{one}",
            f"--{one}-{two}={random.randrange(100)}",
            f"-{random.choice('abcdefghilmnopqrstuvxz')}",
            f"{random.choice(_COMMANDS)} {one}",
            f"{random.choice(_COMMANDS)} -{random.choice('abflnrtvx')} {one}",
            f"{one}_{two}",
            f"{one}{two.title()}",
            f"{one}{two.title()}",
            f"{one}{two.title()}{_word(random).title()}",
            f"{one.upper()}_{two.upper()}",
            f"{one}()",
            f"{one}.{two}()",
            f"{one} = {two} + {random.randrange(10)}",
            f"{random.choice('abcxyz')} {random.choice(['==', '!=', '<=', '>=', '<', '>'])} {random.choice('abcxyz')}",
            f"SELECT {one} FROM {two};",
            random.choice([":-)", ";-)", ":)", ":-(", ":D", "^_^", "<3", ":-P", "xD"]),
        ]
    )


def emoji(random: Random) -> str:
    if random.random() < 0.5:
        one = random.choice(_COMMON_EMOJI)
    else:
        one = chr(random.randint(*random.choice(_EMOJI_RANGES)))
        while unicodedata.category(one) != "So":
            one = chr(random.randint(*random.choice(_EMOJI_RANGES)))
        if random.random() < 0.15:
            one += random.choice(
                ["\ufe0f", f"\u200d{random.choice('💻🔬🎨🚀🌈')}", chr(random.randint(0x1F3FB, 0x1F3FF))]
            )
        elif random.random() < 0.1:
            one = "".join(chr(0x1F1E6 + random.randrange(26)) for _ in range(2))  # a flag
    return random.choice([one, one, one, one * 2, one * 3, f"{one} {one}"])


def other_script(random: Random) -> str:
    """Letters at random: what is to be learned is to copy them, not their words."""

    def word() -> str:
        kind = random.random()
        if kind < 0.2:
            return "".join(chr(random.randint(0x4E00, 0x9FA5)) for _ in range(random.randint(1, 5)))
        if kind < 0.3:
            return "".join(chr(random.randint(0xAC00, 0xD7A3)) for _ in range(random.randint(1, 5)))
        letters = random.choice(_SCRIPTS)
        text = "".join(random.choices(letters, k=random.randint(2, 9)))
        return text.capitalize() if random.random() < 0.5 else text

    text = " ".join(word() for _ in range(random.randint(1, 3)))
    text += random.choice(["", "", "", "!", "?", "."])
    return unicodedata.normalize("NFKC", text)  # as the vocabulary does: else it could not be copied


def man(random: Random) -> str:
    return random.choice(_MEN)


def woman(random: Random) -> str:
    return random.choice(_WOMEN)


def name(random: Random) -> str:
    return random.choice(_MEN + _WOMEN)


Maker = Callable[[Random], str]
COPIED: tuple[Maker, ...] = (number, address, placeholder, tag, name_of_a_thing, emoji, other_script)
INLINE: tuple[Maker, ...] = (number, address, placeholder, placeholder, name_of_a_thing, name, other_script)


def copies(random: Random, count: int) -> Iterator[Pair]:
    """Lines of nothing but strings to copy, mostly one."""
    for _ in range(count):
        text = random.choice(COPIED)(random)
        if random.random() < 0.15:
            text += random.choice([" ", " ", ", ", " / ", " - "]) + random.choice(COPIED)(random)
        yield Pair(text, text, "copy")


def filled(random: Random, templates: Sequence[tuple[str, str]], count: int) -> Iterator[Pair]:
    """Templates have the same number of {} on both sides, and their strings in the same order."""
    for _ in range(count):
        source, target = random.choice(templates)
        values = [random.choice(INLINE)(random) for _ in range(source.count("{}"))]
        # not str.format: a value may have braces
        pieces = [_fill(text, values) for text in (source, target)]
        yield Pair(pieces[0], pieces[1], "template")


def _fill(text: str, values: list[str]) -> str:
    parts = text.split("{}")
    return "".join(part + value for part, value in zip(parts, [*values, ""], strict=True))


def decorated(pair: Pair, random: Random) -> Pair | None:
    """The same string at the same end of both sides, or around them."""
    if not is_words(pair):
        return None
    one = random.choice(_TAGS)
    short = len(pair.source.split()) <= 4 and pair.source[-1].isalnum() and pair.target[-1].isalnum()
    ways: list[Callable[[], tuple[str, str]]] = [
        lambda: ("", f" {emoji(random)}"),
        lambda: ("", f" {emoji(random)}"),
        lambda: (f"{emoji(random)} ", ""),
        lambda: (f"<{one}>", f"</{one}>"),
        lambda: (f"<{one}>", f"</{one}>"),
        lambda: ("", f" ({random.choice(INLINE)(random)})"),
        lambda: ("", f" {address(random)}"),
        lambda: (f"{random.choice([name, placeholder, number])(random)}: ", ""),
        lambda: (f"{random.randrange(1, 100)}. ", ""),
        lambda: (f"[{_word(random)}] ", ""),
        lambda: ("- ", ""),
        lambda: ("* ", ""),
        lambda: ("", "<br/>"),
    ]
    if short:
        ways += [lambda: ("", f": {random.choice(COPIED)(random)}")] * 8
    before, after = random.choice(ways)()
    return Pair(before + pair.source + after, before + pair.target + after, "decorated")


_SLOTS = (
    (re.compile(r"(?<![\w'-])(?:Tom|John)(?![\w'-])"), (man, man, placeholder, other_script)),  # he stays he
    (re.compile(r"(?<![\w'-])(?:Mary|Maria)(?![\w'-])"), (woman, woman, placeholder, other_script)),
    (re.compile(r"(?<![\w'-])Boston(?![\w'-])"), (lambda random: random.choice(_CITIES), placeholder, other_script)),
)
_DIGITS = re.compile(r"(?<![\w.,:/-])\d+(?![\w.,:/-]?\d|\w)")


def replaced(pair: Pair, random: Random) -> Pair | None:
    """Another name, number or placeholder where the same one stands once on both sides."""
    for pattern, makers in _SLOTS:
        ours, theirs = pattern.findall(pair.source), pattern.findall(pair.target)
        if len(ours) == 1 and ours == theirs:
            value = random.choice(makers)(random).rstrip("!?.")
            literal = value.replace("\\", "\\\\")  # not a group's number
            return Pair(pattern.sub(literal, pair.source), pattern.sub(literal, pair.target), "slot")
    ours, theirs = _DIGITS.findall(pair.source), _DIGITS.findall(pair.target)
    if len(ours) == 1 and ours == theirs and int(ours[0]) > 1:
        # as many digits: an hour stays one, and so does a year
        low = 2 if len(ours[0]) == 1 else 10 ** (len(ours[0]) - 1)
        value = str(random.randrange(low, 10 ** len(ours[0])))
        return Pair(_DIGITS.sub(value, pair.source), _DIGITS.sub(value, pair.target), "slot")
    return None
