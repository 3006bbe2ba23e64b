"""A toy language that plants four relations, each measured on its own. One document (data.together=true):

    <doc> sea   Anna met Tom again because she   said near the dogs the cat here now always likes   salt and pepper .
                |____________________________c                          |_______________________a   |___________l
    farewell sailors
             t (by `sea`)

A line begins at the token that decides its end: the governor of the tagged token (of `sailors`, it is `sea`).

l  collocation  the first word decides the second: `salt and` is followed by `pepper`. Always two tokens back.
c  coreference  the pronoun has the gender of the name that opens the sentence; the names after `met` are distractors.
t  topic        the last word follows from the second, over the whole document; a window may show other documents too.
a  agreement    the verb has the number of its subject. Nouns after `near` are attractors; they stand before it and
                behind it, so that neither the first noun nor the last is always the subject.

The rest is bound to come, or uniform (topics, names, nouns, first words), or filler: adverbs between two words that
belong together, the r-th of them with probability in proportion to 1 / r. There are 0 to 2 x `data.distance` of these,
and as a mean over documents just `data.distance`. Likewise there are 0 to 2 x `data.distractors` names after `met`; of
nouns after `near`, 0 to `data.distractors` before the subject and as many behind it. Each number is as likely as the
others. `data.symbols` is the number of nouns and of verbs of each number, and of adverbs.

A document has one or two sentences, each as likely. With data.together=false it has three, each of one kind of three:
`Anna met Tom again because she smiled .`, `near the dogs the cat here now always likes it .`, `salt and pepper .`
Either way the default documents have at most 64 tokens.

A right verb is one of `data.symbols`, so agreement costs ln(symbols) at best and ln(2 symbols) by chance; the others
cost 0 at best, and by chance ln 8 (topic, collocation) and ln 2. On attractors: Linzen et al. 2016, arXiv:1611.01368.
"""

from __future__ import annotations

import math

import numpy as np

from toymha.config import Data
from toymha.data.documents import BEGIN, Expected, Language, Page, numbered

TAGS = ("topic", "agreement", "coreference", "collocation")
TOPIC, AGREEMENT, COREFERENCE, COLLOCATION = 1, 2, 3, 4
SENTENCES = {True: (1, 2), False: (3, 3)}  # fewest and most, by data.together

TOPICS = dict(
    pair.split(":")
    for pair in "sea:sailors war:soldiers love:hearts cooking:kitchens "
    "school:pupils music:dancers winter:snowflakes justice:judges".split()
)
NAMES = "Anna Emma Mary Ruth Tom John Paul Max".split()  # four who are she, four who are he
PRONOUNS = ["she", "he"]
PAIRS = dict(
    pair.split(":")
    for pair in "salt:pepper bread:butter fish:chips pens:paper "
    "milk:honey needle:thread hammer:nails cups:saucers".split()
)
NOUNS = "cat dog bird horse cow duck bear goat farmer baker doctor pilot singer teacher sister king queen girl".split()
VERBS = "like know see hear want need buy sell find bring take paint draw count eat hide hold keep".split()
ADVERBS = "again here today now there softly still then soon once gladly often maybe slowly truly early late so".split()
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def vocabulary(data: Data) -> dict[str, list[str]]:
    n = data.symbols or 0
    nouns, verbs = numbered(NOUNS, n), numbered(VERBS, n)
    return {
        "begin": [BEGIN],
        "topics": list(TOPICS),
        "closings": list(TOPICS.values()),
        "names": NAMES,
        "pronouns": PRONOUNS,
        "firsts": list(PAIRS),
        "seconds": list(PAIRS.values()),
        "singular nouns": nouns,
        "plural nouns": [noun.rstrip("0123456789") + "s" + noun.lstrip(LETTERS) for noun in nouns],
        "singular verbs": [verb.rstrip("0123456789") + "s" + verb.lstrip(LETTERS) for verb in verbs],
        "plural verbs": verbs,
        "adverbs": numbered(ADVERBS, n),
        "links": ["met", "because", *(["said"] if data.together else ["smiled", "it"]), "the", "near", "always", "and"],
        "ends": [".", "farewell"],
    }


def adverb_probabilities(n: int) -> np.ndarray:
    """Zipf's law: in proportion to 1 / rank."""
    weight_S = 1 / np.arange(1, n + 1)
    return weight_S / weight_S.sum()


def draw(data: Data, page: Page) -> None:
    page.say(BEGIN)
    topic_D, topic_at = page.choose("topics")
    for _ in page.times(*SENTENCES[bool(data.together)]):
        _three_in_one(data, page) if data.together else _one_of_three(data, page)
    page.say("farewell")
    page.write(page.ids["closings"][topic_D], tag=TOPIC, governor_D=topic_at)


def _three_in_one(data: Data, page: Page) -> None:
    _coreference(data, page)
    page.say("said")
    _agreement(data, page)
    _collocation(page)
    page.say(".")


def _one_of_three(data: Data, page: Page) -> None:
    kind_D = page.below(3)
    page.owe(-math.log(3))
    with page.only(kind_D == 0):
        _coreference(data, page)
        page.say("smiled .")
    with page.only(kind_D == 1):
        _agreement(data, page)
        page.say("it .")
    with page.only(kind_D == 2):
        _collocation(page)
        page.say(".")


def _coreference(data: Data, page: Page) -> None:
    name_D, name_at = page.choose("names")
    for _ in page.times(0, 2 * (data.distractors or 0)):
        page.say("met")
        page.choose("names")
    _filler(data, page)
    page.say("because")
    page.write(page.ids["pronouns"][name_D // (len(NAMES) // 2)], tag=COREFERENCE, governor_D=name_at)


def _agreement(data: Data, page: Page) -> None:
    _attractors(data, page)
    page.say("the")
    plural_D, subject_at = _noun(page)
    _attractors(data, page)
    _filler(data, page)
    page.say("always")
    verb_D = page.below(data.symbols or 0)
    verbs_2S = np.stack([page.ids["singular verbs"], page.ids["plural verbs"]])
    page.write(verbs_2S[plural_D, verb_D], -math.log(data.symbols or 1), AGREEMENT, subject_at)


def _attractors(data: Data, page: Page) -> None:
    for _ in page.times(0, data.distractors or 0):
        page.say("near the")
        _noun(page)


def _noun(page: Page) -> tuple[np.ndarray, int]:
    """Any noun; is it plural (1) or not (0)? And its column."""
    nouns_N = np.concatenate([page.ids["singular nouns"], page.ids["plural nouns"]])
    which_D = page.below(len(nouns_N))
    column = page.write(nouns_N[which_D], -math.log(len(nouns_N)))
    return which_D // (len(nouns_N) // 2), column


def _collocation(page: Page) -> None:
    first_D, first_at = page.choose("firsts")
    page.say("and")
    page.write(page.ids["seconds"][first_D], tag=COLLOCATION, governor_D=first_at)


def _filler(data: Data, page: Page) -> None:
    for _ in page.times(0, 2 * (data.distance or 0)):
        page.draw("adverbs", adverb_probabilities(data.symbols or 1))


def expected(data: Data) -> Expected:
    """Exact: the entropies of the choices above, added up; means where their number varies."""
    S, d, n = data.symbols or 1, data.distance or 0, data.distractors or 0
    fewest, most = SENTENCES[bool(data.together)]
    p_S = adverb_probabilities(S)
    filler = d * float(-(p_S * np.log(p_S)).sum())
    filler += math.log(2 * d + 1)  # how many
    # (tokens, nats) of each relation
    coreference = 3 + 2 * n + d, (1 + n) * math.log(len(NAMES)) + math.log(2 * n + 1) + filler
    agreement = 4 + 3 * n + d, (1 + n) * math.log(2 * S) + 2 * math.log(n + 1) + filler + math.log(S)
    collocation = 3, math.log(len(PAIRS))
    tokens, nats = (float(sum(part)) for part in zip(coreference, agreement, collocation))
    if data.together:
        tokens += 2  # `said` and the full stop
    else:
        tokens, nats = (tokens + 2 + 2 + 1) / 3, nats / 3 + math.log(3)  # `smiled .`, `it .`, `.`
    mean = (fewest + most) / 2
    floors = {"topic": 0.0, "agreement": math.log(S), "coreference": 0.0, "collocation": 0.0}
    nats = math.log(len(TOPICS)) + math.log(most - fewest + 1) + mean * nats
    return Expected(4 + mean * tokens, nats, floors)


RELATIONS = Language(
    title="a toy language with four planted relations",
    origin="generated; after Linzen et al. 2016, arXiv:1611.01368",
    tags=TAGS,
    vocabulary=vocabulary,
    draw=draw,
    expected=expected,
    open_classes=("singular verbs", "plural verbs"),
)
