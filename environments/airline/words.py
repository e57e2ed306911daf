"""Word lists of the generated airline: given and family names, streets."""

from __future__ import annotations

_FIRST_NAMES = (
    "Adela Bruno Celia Dario Edith Felix Greta Hamid Ilona Jonas Katia Lionel Marta Nestor Oriana Pavel Quentin Rosa "
    "Selma Tobias Ursula Viktor Wanda Xenia Yannick Zelda Amara Bastian Corina Dimitri Elsa Fabian Gisela Henrik "
    "Isolde Jorma Kerstin Ludovic Mirela Norbert"
)
FIRST_NAMES = tuple(_FIRST_NAMES.split())
_LAST_NAMES = (
    "Abbott Bergmann Castell Dorval Ekholm Fontaine Grieve Hallam Iversen Jurado Kestrel Lindqvist Moreau Norwood "
    "Ottesen Pemberton Quiroga Rasmussen Stanhope Tillman Ulrich Vasquez Whitlock Yardley Zeller Ashdown Birchall "
    "Corrigan Dunmore Ellsworth Farrow Gunnarson Hathaway Ingram Jessop Kowalik Lockhart Mansfield Newbury Oakes "
    "Prescott Redfern Sandoval Thackeray Underhill Verhoeven Westlake Yates Zamora Blackwood"
)
LAST_NAMES = tuple(_LAST_NAMES.split())
_STREETS = (
    "Alder Beacon Canal Dover Elmwood Foundry Garrison Harbor Ivy Juniper Kiln Laurel Mason Orchard Poplar Quarry "
    "Ropewalk Saddler Tannery Weaver"
)
STREETS = tuple(_STREETS.split())
