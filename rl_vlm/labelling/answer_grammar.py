"""A grammar of statements that say in which of two images a goal is better achieved.

A statement counts only if the grammar accounts for every word of it, up to a reason at its end. Words that merely occur
("better", "1") decide nothing: "I don't think Image 1 is better" is not understood, which is no label, whereas a label for
the wrong image would teach the reward model the opposite. Two tables are the grammar: `_LEXICON` turns each phrase into a
symbol of one character, `_SHAPES` lists the rows of symbols that are statements. Images are A and B, see `answer_text`.
"""

from __future__ import annotations

import functools
import re

# Qualities that say how far a goal is reached: (stems in goals that ask for it, its words in answers, whether it counts as
# good where the goal does not ask for it).
_QUALITIES = (
    (r"upright|vertical|balanc|stabl", r"upright|vertical\w*|balanced|stable|steady", True),
    (r"straight|flat|stretch|unfold", r"straight\w*|flat|flatter|flattened|stretched|unfolded", True),
    (r"open|extend|pull", r"open|opened|extended|pulled out", True),
    (r"clos|shut", r"closed|shut", False),
    (r"fold|bend|curl|coil", r"folded|bent|curled|coiled", False),
    (r"press|push", r"pressed|pushed|depressed", False),
    (r"fill|pour", r"full|filled", False),
    (r"lift|rais|pick", r"lifted|raised", False),
)
_OPPOSITES = ((2, 3), (1, 4))  # rows of _QUALITIES: where the goal asks for one of them, the other one is not good
_SUCCESS = (
    r"success\w*|complet\w*|achiev\w*|reach\w*|accomplish\w*|fulfil\w*|satisf\w*|attain\w*|meeting|aligned|accurate\w*|"
    r"effective\w*|desirable|suitable|promising|advanced|favou?rable|optimal|finished|done|progress\w*"
)
_TASKS = r"(?:open|clos|balanc|straighten|flatten|fold|push|pull|press|mov|plac|pick|bring|lift|grasp|scor|put|stack|pour|turn)(?:t?ing)"
# Words of goals that name no thing to be close to.
_NO_PLACES = r"with|from|into|onto|that|this|have|much|possible|without|close|near|camera|spilling"

_ADVERBS = (
    r"clearly|definitely|certainly|obviously|evidently|undoubtedly|slightly|marginally|significantly|considerably|noticeably|"
    r"visibly|substantially|somewhat|much|far|a (?:bit|little|lot)|only (?:slightly|marginally)|just|even|still|also|overall|"
    r"simply|probably|likely|most likely|generally|actually|really|currently|now|indeed|by far|very|being|being fully|therefore|"
    r"thus|already|finally|successfully|strongly|fully|almost|nearly|completely|mostly|partially|here|there|then|the|a|an|its|"
    r"their|that|this|these|in (?:this|that) (?:case|comparison|regard)|in comparison|please|perfectly|ever so"
)
# (symbol, its phrases; the comment says what they express). The first entry that matches counts. Articles and adverbs of
# degree have no symbol. A word that no entry lists becomes "w", another token "#", and marks stand for themselves.
_LEXICON: tuple[tuple[str, str], ...] = (
    ("", r"to me|to be honest|of (?:the|these) two(?: images)?"),
    (  # the speaker's opinion or a conclusion: opens a statement
        "o",
        r"i(?: would|'d)? (?:{adverbs} )?(?:think|believe|say|feel|conclude|find|judge|guess)(?: that)?|"
        r"(?:it|this) (?:seems|appears|looks like|suggests|means|is (?:clear|evident|obvious))(?: to me)?(?: that)?|(?:which|that) means|"
        r"(?:in|from) my (?:honest )?(?:opinion|view|judge?ment|assessment|perspective)|(?:in|as a) (?:conclusion|summary|result|short)|as such|"
        r"to (?:conclude|summari[sz]e)|all in all|in the end|yes|so|thus|therefore|hence|consequently|ultimately|overall|"
        r"=>|->|→|conclusion|summary|reason(?:ing)?|explanation|comparison",
    ),
    (  # an introduction: what was compared
        "l",
        r"after|having|upon|looking at|comparing|based on(?! a )|according to(?= (?:the|this|what)\b)|judging (?:from|by)|considering|between|among|regarding",
    ),
    ("y", r"while|although|though|even though|whereas|despite"),  # concession
    (  # choice
        "c",
        r"(?:i(?: would|'d| will|'ll| am|'m)? (?:{adverbs} )?)?(?:choose|pick|prefer|select)|i(?: would|'d| will|'ll| am|'m)? (?:{adverbs} )?"
        r"(?:chose|favou?r|go with|going with|go for|vote for|opt for|lean towards?|lean to|answer|label (?:this|it)(?: as)?|reply(?: with)?)",
    ),
    (  # comparison with the other image
        ">",
        r"than|(?:when |as )?compared (?:to|with)|rather than|instead of|as opposed to|in (?:contrast|comparison) (?:to|with)|unlike|versus|vs\.?|relative to|over|>|beats",
    ),
    (  # doubt, condition, another's opinion: no statement holds it
        "?",
        r"if|unless|whether|or|either|maybe|perhaps|possibly|might|may|could|would have|were|wrong\w*|false\w*|incorrect\w*|untrue|mistake\w*|doubt\w*|"
        r"says?|said|saying|told|thinks?|thought|believes?|some|somebody|someone|others|people|anyone|anybody|everyone|everybody|reasons?|would|asked|questions?|wonder\w*|claims?|"
        r"argu\w+|pretends?|opposite|unsure|uncertain\w*|unclear|unlikely|supposed(?:ly)?|suppose|assum\w+|imagine|pretend|but|however|yet",
    ),
    (  # negation
        "x",
        r"not|no|never|nor|none|nothing|nobody|neither|hardly|barely|scarcely|without|\w+n't|cannot|fail\w*|only|both|equal\w*|same|similar\w*",
    ),
    ("d", r"distance|gap"),
    ("s", r"smaller|shorter"),
    (  # properties of the picture itself: no statement holds them
        "u",
        r"camera|viewer|views?|viewpoint|lighting|lights?|lit|quality|resolution|background|colou?rs?|contrast|perspective|exposure|composition|"
        r"framing|shadows?|textures?|sharp\w*|clarity|clearer|visib\w*|brightness|details?|size",
    ),
    ("f", r"(?:further|farther)(?: away)? from|far from"),
    (  # preferred
        "p",
        r"(?:further|farther) (?:along|ahead)|ahead|(?:the )?winner|my (?:choice|pick|preference)|preferable|preferred|favou?red|superior",
    ),
    ("W", r"wins|succeeds"),
    (  # more progress
        "j",
        r"(?:more|greater|better|best|most) (?:{adverbs} )?(?:progress|results?|outcome|performance|achievement|success|job|state|configuration|alignment|position|"
        r"goal (?:achievement|completion|attainment)|(?:match|fit|representation|example|illustration)(?= (?:of|for|to)\b))",
    ),
    (  # more of a quality that the goal asks for
        "*",
        r"(?:more|most) (?:{adverbs} )?(?:{quality})|straighter|(?:opened?|pulled(?: out)?|extended) (?:wider|further|more)|(?:wider|further|farther) open(?:ed)?",
    ),
    ("-", r"worse|worst|inferior|poorer|less (?:{adverbs} )?(?:{quality})"),
    ("n", r"closer|closest|nearer|nearest"),
    (  # better
        "+",
        r"better|best|more (?:closely|fully|completely|nearly|convincingly)|(?:correct|winning)(?= (?:image|one|choice|answer)\b)",
    ),
    ("!", r"(?:achieved|satisfied|met|reached|accomplished|fulfilled|completed|reali[sz]ed|attained)"),
    (  # achieves
        "a",
        r"(?:achieves|meets|satisfies|reaches|fulfil+s|accomplishes|completes|reali[sz]es|attains|approaches|serves|matches|resembles|fits|suits|corresponds to|aligns with)",
    ),
    (  # the goal
        "g",
        r"(?:our |stated |desired |given |final |intended |task )*(?:goals?|objective|target|task)(?: (?:state|position|configuration|pose|location))?|"
        r"(?:desired|target|final|intended|ideal|correct) (?:state|position|configuration|outcome|result|condition|pose|location)",
    ),
    (  # is, looks, performs
        "v",
        r"(?:is (?:doing|considered|standing|held)|is|are|was|has been|would be|(?:looks|appears|seems)(?: to (?:be|have been))?|comes|gets|came|got|performs|fares|stands|remains|stays|ends up|'s)",
    ),
    (  # shows, makes
        "h",
        r"shows?|has(?: made| achieved)?|makes|made|demonstrates|represents|depicts|displays|reflects|indicates|does",
    ),
    (  # a reason follows
        "r",
        r"because|since|as(?! (?:for|far|regards|long|if|soon|well|bad|good|though|much|little|close)\b)|due to|given(?! (?:goal|task))|where|which|meaning|indicating|showing|making|having",
    ),
    ("t", r"to|towards?|at|in terms of|as for|with respect to|with regard to|in relation to|with"),
    ("i", r"in|of|on|from|within|inside|for|by|shown in|seen in|depicted in"),  # location
    (  # the answer
        "k",
        r"(?:my |final |correct |answer )*(?:answer|vote|selected|chosen|label|choice|preference|pick|selection|verdict|decision|result|response|output|reply|prediction)(?: value)?",
    ),
    ("z", r"images?|picture|frame|photo|one|option|match|fit|outcome|candidate"),  # noun for an image
    ("e", r"it"),  # refers to anything
    ("q", r"(?:{place})"),  # a quality or a thing that the goal names
    ("", r"(?:{adverbs})"),
)

_THING = r"(?:[wgqkz](?:[wgqkz]|i(?=[wgqz])|'(?=w)){0,7})"  # a noun phrase without words that could reverse a statement
_GOAL = r"(?:[gq!](?:[wgqt!]|i(?=[wgq])){0,14}|e)"  # "the goal of opening the drawer", "achieving the goal", "vertical"
_GOOD = rf"(?:[+p][zkq]?|n(?:t?{_GOAL})?z?|\*|z[+n](?:t{_GOAL})?|zvn(?:t{_GOAL})?)"
_GOOD_THING = rf"(?:\+q?|nt?{_GOAL}|\*|p)"
_BAD = rf"(?:-[zk]?|f{_GOAL})"
_DONE = r"(?:[+*]|nt)?!(?:[+*])?"
# (rows of symbols with the image {S} that they are about; 0: that image is better, 1: the other one is)
_SHAPES: tuple[tuple[str, int], ...] = (
    (rf"{{S}}v{_GOOD}", 0),  # Image 1 is better
    (rf"{{S}}v{_BAD}", 1),  # Image 1 is worse
    (rf"{{S}}vj[it]{_GOAL}", 0),  # Image 1 is a better match for the goal
    (r"{S}(?::?[+p]|:n)", 0),  # Image 1: better
    (
        rf"{{S}}(?:vz)?(?:\+?a{_GOAL}\+?|\*{_GOAL}?|hj|h\+|hn|W|\+h{_GOAL}|h\+!{_GOAL}|h{_GOAL}\+|h{_THING}\*|h\*[wqg]{{0,3}})",
        0,
    ),  # Image 1 achieves the goal better, wins
    (rf"{_THING}i{{S}}v{_GOOD_THING}", 0),  # the pole in Image 1 is more upright
    (rf"{_THING}i{{S}}v{_BAD}", 1),
    (rf"{{S}}v{_THING}v{_GOOD_THING}", 0),  # Image 1's pole is more upright
    (rf"{{S}}v{_THING}v{_BAD}", 1),
    (rf"i{{S}},?(?:{_THING}|e)v{_GOOD_THING}", 0),  # in Image 1 the pole is more upright
    (rf"i{{S}},?(?:{_THING}|e)v{_BAD}", 1),
    (rf"i{{S}},?{_GOAL}v{_DONE}", 0),  # in Image 1 the goal is better achieved
    (rf"(?:{_GOAL}|e)v{_DONE}i{{S}}", 0),  # the goal is better achieved in Image 1
    (rf"{_GOAL}?[+*]!i{{S}}", 0),  # better achieved in Image 1
    (rf"(?:{_THING}v|ev)?{_GOOD_THING}i{{S}}", 0),  # the pole is more upright in Image 1
    (r"(?:e?v)?ni{S}", 0),  # closer in Image 1
    (rf"(?:{_THING}v|ev)?{_BAD}i{{S}}", 1),
    (rf"(?:w?v)?j(?:v[wh])?(?:[ti]{_GOAL})?i{{S}}", 0),  # there is more progress in Image 1
    (rf"d(?:[ti]{_GOAL})?vsi{{S}}", 0),  # the distance to the goal is smaller in Image 1
    (r"ci?{S}", 0),  # I choose Image 1
    (rf"(?:[+]?k|[+p]z?|zv?{_GOOD}|nz?(?:t{_GOAL})?)(?:v:?|:|o)i?{{S}}", 0),  # the better image is Image 1
    (rf"zi?r{_GOAL}v{_DONE}v{{S}}", 0),  # the image in which the goal is better achieved is Image 1
    (r"(?:evi?)?{S}", 0),  # it is Image 1; Image 1
    (r"i{S}", 0),  # in Image 1
    (r"{S},?(?:w)?xi?[AB]", 0),  # Image 1, not Image 2
    (rf"ev{_GOOD}>{{S}}", 1),  # it is better than Image 1
)
# "compared to Image 2, ...", "while both show a pole, ...", "so ...".
_OPENING = rf",?(?:o[,:]?|>i?[AB],?|l[^,?]*,|y[^,]*(?:,[^,]*){{0,2}},|r[^,?]*,|[ti](?:{_GOAL}|z),|[kz]:){{0,5}}"  # bounded, or it takes exponential time
_COMPLEMENT = rf"(?:,?(?:>(?:[wgqze]{{0,4}}v?i)?[AB][vh]?|[ti]{_GOAL}|t[AB]|>z)){{0,3}}"
_REASON = r"(?:,?r[^?]*|,?y[^?+*njp-]*)?"  # because the drawer is open; although the goal is not achieved
_COMPARAND = re.compile(r"(?:>|x|(?<=[pc])t|(?<=[pc][AB])t)(?:[wgqze]{0,4}v?i)?([AB])")
_SUBJECT = r"(?P<s>[AB])(?:,>i?[AB],)?"  # the image that a statement is about
_STATEMENTS = tuple(
    (re.compile(_OPENING + shape.replace("{S}", _SUBJECT) + _COMPLEMENT + _REASON), turned) for shape, turned in _SHAPES
)
_MAX_CHARACTERS = 400  # of a statement
# Tokens that are no phrase of the lexicon: an image, a word, a number, or any other character.
_OTHER = r"[A-Z](?![a-z])|[a-z]+(?:[-'][a-z]+)*|-?\d+(?:[.,]\d+)*|(?s:.)"
_MARKS = {mark: mark for mark in ",:()?ABZ"} | {"=": ":", "-": "~"}


class Grammar:
    """The grammar for one goal, whose words add qualities that are good: "closed" for "to close the box"."""

    def __init__(self, goal: str = "") -> None:
        goal = goal.lower()
        asked = {row for row, (stem, _, _) in enumerate(_QUALITIES) if re.search(rf"\b(?:{stem})", goal)}
        opposite = {other for one, two in _OPPOSITES for row, other in ((one, two), (two, one)) if row in asked} - asked
        good = [
            words for row, (_, words, usual) in enumerate(_QUALITIES) if row in asked or (usual and row not in opposite)
        ]
        quality = "|".join([*good, _SUCCESS])
        things = set(re.findall(r"[a-z]{3,}", goal)) - set(f"{_NO_PLACES}|{_ADVERBS}".split("|"))
        place = "|".join([quality, "hole", "net", "peg", _TASKS, *sorted(things)])
        fill = {"{adverbs}": f"(?:{_ADVERBS})", "{quality}": quality, "{place}": place}
        entries = []
        for _, words in _LEXICON:
            for name, regex in fill.items():
                words = words.replace(name, regex)
            entries.append(rf"((?:{words})(?![\w-]))")
        self._token = re.compile("|".join([*entries, _OTHER]))

    def symbols(self, statement: str) -> str:
        """The statement as a row of symbols, one for each phrase of the lexicon, other word, number, image and mark."""
        row = ""
        for token in self._token.finditer(statement):
            if token.lastindex:
                row += _LEXICON[token.lastindex - 1][0]
            elif token[0] != " ":
                row += _MARKS.get(token[0], "w" if token[0].isalpha() else "#")
        return row

    def opens(self, words: str) -> bool:
        """Whether these words, with a comma behind them, merely open a statement ("overall", "in my opinion")."""
        return re.fullmatch(_OPENING, self.symbols(words) + ",") is not None

    def verdict(self, statement: str) -> int | None:
        """0 or 1 where the whole statement says that the first or the second image is better, else None."""
        if len(statement) > _MAX_CHARACTERS:
            return None
        row = self.symbols(statement)
        match, turned = next(
            ((found, turned) for shape, turned in _STATEMENTS if (found := shape.fullmatch(row))), (None, 0)
        )
        if match is None:
            return None
        subject = match["s"]
        others = set(_COMPARAND.findall(row))
        if row[match.start("s") - 1 : match.start("s")] == ">":  # "it is better than Image 1" compares with its subject
            others.discard(subject)
        return None if subject in others else "AB".index(subject) ^ turned


grammar = functools.lru_cache(maxsize=64)(Grammar)  # compiling one takes milliseconds, and a run has one goal
