"""The words that the shop's database is made of: people, places, and fifty products with their options."""

from __future__ import annotations

_FIRST = """
Ada Bruno Cleo Dario Edda Felix Greta Hugo Ilse Jonas Kira Lorenz Mira Nils Orla Pavel Quinn Rosa Silas Tilda
Uma Viktor Wanda Xenia Yorick Zita Alba Bela Carmen Dora Elio Fiona Gustav Hedda Ines Janko Klara Leif Marta Nora
"""
_LAST = """
Abel Baum Cole Dahl Egan Frost Gale Holm Iver Jost Kern Lund Marsh Nash Oster Pike Quist Reed Stark Thorn
Ulm Vance West Yates Zorn Ash Birk Crane Drake Elder Falk Grove Hale Irwin Kemp Lowe Moor Nye Orr Penn
"""
FIRST_NAMES, LAST_NAMES = tuple(_FIRST.split()), tuple(_LAST.split())
STREETS = (
    "Fern Way",
    "Quarry Row",
    "Mill Court",
    "Harbor Walk",
    "Orchard Rise",
    "Chapel Yard",
    "Bridge Gate",
    "Kiln End",
)
CITIES = (
    ("Salem", "OR", "973"),
    ("Fargo", "ND", "581"),
    ("Boise", "ID", "837"),
    ("Tulsa", "OK", "741"),
    ("Provo", "UT", "846"),
    ("Macon", "GA", "312"),
    ("Akron", "OH", "443"),
    ("Erie", "PA", "165"),
    ("Reno", "NV", "895"),
    ("Waco", "TX", "767"),
    ("Utica", "NY", "135"),
    ("Flint", "MI", "485"),
)
"""City, state, first three digits of its zip codes."""
MAIL = ("post.com", "inbox.org")
BRANDS = ("visa", "mastercard")

_COLORS = "color: red, blue, green, black"
_SIZES = "size: small, medium, large"
_WOODS = "wood: oak, pine, beech"
_METALS = "metal: steel, brass, copper"
_SHELF = f"""
Rain Coat | 64 | {_COLORS} | {_SIZES}
Wool Scarf | 27 | {_COLORS} | pattern: plain, striped
Felt Hat | 38 | {_COLORS} | {_SIZES}
Belt | 31 | color: brown, black | {_SIZES}
Mittens | 19 | {_COLORS} | {_SIZES}
Apron | 23 | {_COLORS} | pattern: plain, striped, dotted
Slippers | 29 | {_COLORS} | {_SIZES}
Suit Case | 112 | {_COLORS} | {_SIZES}
Hand Bag | 71 | {_COLORS} | closure: clasp, button
Wallet | 34 | color: brown, black | closure: clasp, button
Teapot | 36 | {_COLORS} | volume: half-liter, liter
Frying Pan | 44 | {_METALS} | {_SIZES}
Bread Knife | 26 | {_WOODS} | {_SIZES}
Salad Bowl | 33 | {_WOODS} | {_SIZES}
Rolling Pin | 17 | {_WOODS} | {_SIZES}
Spice Rack | 41 | {_WOODS} | tiers: two, three, four
Wine Rack | 58 | {_WOODS} | tiers: two, three, four
Candle Holder | 22 | {_METALS} | {_SIZES}
Scale | 39 | unit: metric, imperial | {_COLORS}
Toaster | 47 | {_COLORS} | slots: two, four
Pillow | 24 | {_COLORS} | filling: down, foam
Blanket | 52 | {_COLORS} | fabric: wool, cotton
Bath Towel | 18 | {_COLORS} | {_SIZES}
Curtain | 49 | {_COLORS} | fabric: linen, cotton
Door Mat | 21 | {_COLORS} | {_SIZES}
Side Table | 88 | {_WOODS} | shape: round, square
Bar Stool | 76 | {_WOODS} | height: low, high
Rocking Chair | 164 | {_WOODS} | {_COLORS}
Picture Frame | 28 | {_WOODS} | {_SIZES}
Mirror | 67 | {_METALS} | shape: round, square
Garden Bench | 143 | {_WOODS} | {_SIZES}
Watering Can | 25 | {_METALS} | volume: small, large
Flower Pot | 16 | {_COLORS} | {_SIZES}
Bird House | 32 | {_WOODS} | {_COLORS}
Rake | 29 | {_WOODS} | width: narrow, wide
Hand Saw | 37 | {_WOODS} | teeth: fine, coarse
Step Ladder | 83 | {_METALS} | steps: three, four, five
Tool Box | 46 | {_COLORS} | {_SIZES}
Lantern | 42 | {_METALS} | {_COLORS}
Compass | 24 | {_METALS} | needle: plain, glowing
Fishing Rod | 69 | length: short, long | {_COLORS}
Kite | 18 | {_COLORS} | {_SIZES}
Sled | 62 | {_WOODS} | {_SIZES}
Chess Board | 55 | {_WOODS} | {_SIZES}
Ukulele | 97 | {_WOODS} | {_COLORS}
Harmonica | 35 | key: high, low | {_METALS}
Music Stand | 48 | {_METALS} | height: low, high
Sketch Pad | 14 | paper: smooth, rough | {_SIZES}
Fountain Pen | 53 | {_COLORS} | nib: fine, broad
Globe | 74 | {_COLORS} | {_SIZES}
"""


def _options(column: str) -> tuple[str, tuple[str, ...]]:
    name, values = column.split(": ")
    return name, tuple(values.split(", "))


PRODUCTS: dict[str, tuple[int, dict[str, tuple[str, ...]]]] = {
    name: (int(price), dict(_options(column) for column in columns))
    for name, price, *columns in (line.split(" | ") for line in _SHELF.strip().splitlines())
}
"""Product -> price in dollars about which its variants lie, and the values of each option."""
