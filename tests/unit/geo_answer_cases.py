"""Answers about places, written by hand, and what a careful reader takes from each: (text, city, region, country, coords, valid).

None stands for what is missing or can be read in two ways.
"""

from __future__ import annotations

Case = tuple[str, str | None, str | None, str | None, tuple[float, float] | None, bool]

_FIVE = "City: Lyon\nRegion: Auvergne-Rhône-Alpes\nCountry: France\nLatitude: 45.76\nLongitude: 4.84"
_READ = ("Lyon", "Auvergne-Rhône-Alpes", "France", (45.76, 4.84), True)


def _coords(latitude: str, longitude: str) -> str:
    return f"City: Lyon\nRegion: Rhône\nCountry: FR\nLatitude: {latitude}\nLongitude: {longitude}"


def _at(latitude: float, longitude: float) -> tuple[str, str, str, tuple[float, float], bool]:
    return "Lyon", "Rhône", "FR", (latitude, longitude), True


_NOWHERE = ("Lyon", "Rhône", "FR", None, False)

FORMS: list[Case] = [
    (_FIVE, *_READ),
    (_FIVE.lower(), "lyon", "auvergne-rhône-alpes", "france", (45.76, 4.84), True),
    (_FIVE.upper(), "LYON", "AUVERGNE-RHÔNE-ALPES", "FRANCE", (45.76, 4.84), True),
    (_FIVE.replace("\n", "\n\n"), *_READ),
    (_FIVE.replace("\n", "\r\n"), *_READ),
    ("  " + _FIVE.replace("\n", "  \n   "), *_READ),
    (_FIVE.replace(": ", ":"), *_READ),
    (_FIVE.replace("\n", "<br>"), *_READ),
    (_FIVE.replace("\n", "<br/>\n"), *_READ),
    (_FIVE.replace("Lyon", "Lyon, Auvergne-Rhône-Alpes, France"), *_READ),
    (_FIVE.replace("Lyon", "Lyon, france").replace("Alpes", "Alpes, France"), *_READ),
    (_FIVE.replace("Lyon", "Lyon, Paris"), "Lyon, Paris", *_READ[1:]),
    (_FIVE.replace(": ", " : "), *_READ),
    (_FIVE.replace(": ", " = "), *_READ),
    (_FIVE.replace(": ", " - "), *_READ),
    (_FIVE.replace(": ", " – "), *_READ),
    ("- " + _FIVE.replace("\n", "\n- "), *_READ),
    ("* " + _FIVE.replace("\n", "\n* "), *_READ),
    ("• " + _FIVE.replace("\n", "\n• "), *_READ),
    ("\n".join(f"{k}. {line}" for k, line in enumerate(_FIVE.splitlines(), 1)), *_READ),
    ("\n".join(f"{k}) {line}" for k, line in enumerate(_FIVE.splitlines(), 1)), *_READ),
    ("\n".join("**" + line.replace(":", ":**", 1) for line in _FIVE.splitlines()), *_READ),
    ("\n".join("**" + line.replace(":", "**:", 1) for line in _FIVE.splitlines()), *_READ),
    ("\n".join("- **" + line.replace(": ", ":** `", 1) + "`" for line in _FIVE.splitlines()), *_READ),
    ("\n".join("### " + line for line in _FIVE.splitlines()), *_READ),
    ("\n".join("> " + line for line in _FIVE.splitlines()), *_READ),
    ("\n".join("| " + line.replace(": ", " | ", 1) + " |" for line in _FIVE.splitlines()), *_READ),
    ("```\n" + _FIVE + "\n```", *_READ),
    (_FIVE.replace("Region", "State"), *_READ),
    (_FIVE.replace("Region", "Province"), *_READ),
    (_FIVE.replace("Region", "State/Province"), *_READ),
    (_FIVE.replace("City", "Town"), *_READ),
    (_FIVE.replace("Country", "Country code").replace("France", "FR"), "Lyon", "Auvergne-Rhône-Alpes", "FR", (45.76, 4.84), True),
    (_FIVE.replace("Latitude", "Lat").replace("Longitude", "Lon"), *_READ),
    (_FIVE.replace("Latitude", "lat").replace("Longitude", "lng"), *_READ),
    (_FIVE.replace("Latitude", "Latitude (degrees)"), *_READ),
    ("The signs are French and the hills look like Beaujolais.\n\n" + _FIVE, *_READ),
    ("<think>Country: Spain? No.</think>\n" + _FIVE, *_READ),
    (_FIVE + "\n" + _FIVE, *_READ),
    (_FIVE.replace("\n", ", "), *_READ),
    (_FIVE.replace("\n", "; "), *_READ),
    (_FIVE.replace("\n", " | "), *_READ),
    ('{"city": "Lyon", "region": "Auvergne-Rhône-Alpes", "country": "France", "latitude": 45.76, "longitude": 4.84}', *_READ),
    ('{\n  "City": "Lyon",\n  "Region": "Auvergne-Rhône-Alpes",\n  "Country": "France",\n  "Latitude": "45.76",\n  "Longitude": "4.84"\n}', *_READ),
    ("\n".join(reversed(_FIVE.splitlines())), *_READ),
    (_FIVE.replace("Lyon", "Lyon."), *_READ),
    ("Lyon\nAuvergne-Rhône-Alpes\nFrance\n45.76\n4.84", *_READ),
    ("1. Lyon\n2. Auvergne-Rhône-Alpes\n3. France\n4. 45.76\n5. 4.84", *_READ),
    ("- Lyon\n- Auvergne-Rhône-Alpes\n- France\n- 45,76\n- 4,84", *_READ),
    ("Lyon, Auvergne-Rhône-Alpes, France, 45.76, 4.84", *_READ),
    ("5 3\n" + _FIVE, *_READ),
]  # fmt: skip

NUMBERS: list[Case] = [
    (_coords("-33.87", "151.21"), *_at(-33.87, 151.21)),
    (_coords("+33.87", "-0.5"), *_at(33.87, -0.5)),
    (_coords("−33.87", "151.21"), *_at(-33.87, 151.21)),
    (_coords("33,87", "151,21"), *_at(33.87, 151.21)),
    (_coords("33.87 S", "151.21 E"), *_at(-33.87, 151.21)),
    (_coords("33.87° S", "151.21° E"), *_at(-33.87, 151.21)),
    (_coords("33.87°S", "58.4°W"), *_at(-33.87, -58.4)),
    (_coords("S 33.87", "W 58.4"), *_at(-33.87, -58.4)),
    (_coords("33.87 degrees South", "58.4 degrees West"), *_at(-33.87, -58.4)),
    (_coords("-33.87°", "151.21°"), *_at(-33.87, 151.21)),
    (_coords("33°30'00\" S", "151°15' E"), *_at(-33.5, 151.25)),
    (_coords("33°30′36″ N", "0°6′0″ W"), *_at(33.51, -0.1)),
    (_coords("０.５", "１２"), *_at(0.5, 12.0)),
    (_coords("0", "0"), *_at(0.0, 0.0)),
    (_coords("90", "-180"), *_at(90.0, -180.0)),
    ("City: Lyon\nRegion: Rhône\nCountry: FR\nCoordinates: 45.76, 4.84", *_at(45.76, 4.84)),
    ("City: Lyon\nRegion: Rhône\nCountry: FR\nCoordinates: 45.76,4.84", *_at(45.76, 4.84)),
    ("City: Lyon\nRegion: Rhône\nCountry: FR\nCoordinates: (45.76° N, 4.84° E)", *_at(45.76, 4.84)),
    ("City: Lyon\nRegion: Rhône\nCountry: FR\nGPS: 45.76; -4.84", *_at(45.76, -4.84)),
    ("City: Lyon\nRegion: Rhône\nCountry: FR\nLat/Lon: 45,76 / 4,84", *_at(45.76, 4.84)),
]

UNCLEAR: list[Case] = [
    ("", None, None, None, None, False),
    ("I do not know where this is.", None, None, None, None, False),
    ("Paris", None, None, None, None, False),
    ("Paris, France", None, None, None, None, False),
    ("France\nSpain\nItaly\nGermany\nPoland", None, None, None, None, False),
    ("Lyon\nFrance\n45.76\n4.84", None, None, None, None, False),
    ("Country: France\nCountry: Spain", None, None, None, None, False),
    ("Country: France\nCountry: FRANCE", None, None, "France", None, False),
    (_FIVE + "\nCity: Paris", None, "Auvergne-Rhône-Alpes", "France", (45.76, 4.84), False),
    (_FIVE + "\nLatitude: 12", "Lyon", "Auvergne-Rhône-Alpes", "France", None, False),
    (_FIVE + "\nCoordinates: 45.76, 4.84", "Lyon", "Auvergne-Rhône-Alpes", "France", None, False),
    ("City: <name>\nRegion: <state or province>\nCountry: <name or two-letter code>", None, None, None, None, False),
    ("City: unknown\nCountry: N/A\nRegion: -", None, None, None, None, False),
    ("Coordinates: 45,76", None, None, None, None, False),
    ("Coordinates: 45.76, 4.84, 3.2", None, None, None, None, False),
    ("Coordinates: 45.76", None, None, None, None, False),
    (_coords("-33.87 S", "151.21"), *_NOWHERE),
    (_coords("33.87 E", "151.21"), *_NOWHERE),
    (_coords("33.87", "N 151.21"), *_NOWHERE),
    (_coords("N 33.87 S", "151.21"), *_NOWHERE),
    (_coords("91", "10"), *_NOWHERE),
    (_coords("45", "181"), *_NOWHERE),
    (_coords("45.76, 4.84", "4.84"), *_NOWHERE),
    (_coords("40-50", "4.84"), *_NOWHERE),
    (_coords("about 45", "4.84"), *_NOWHERE),
    (_coords("45 or 46", "4.84"), *_NOWHERE),
    (_coords("nan", "nan"), *_NOWHERE),
    (_coords("inf", "-inf"), *_NOWHERE),
    (_coords("1e1", "1e2"), *_NOWHERE),
    (_coords("0x10", "12"), *_NOWHERE),
    (_coords("45.7.6", "12"), *_NOWHERE),
    (_coords("٤٥", "١٢"), *_NOWHERE),
    ("Latitude: 45.76", None, None, None, None, False),
]

CASES = FORMS + NUMBERS + UNCLEAR
