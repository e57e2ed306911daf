"""The words that the shop is made of: people, products, cities, order numbers."""

from __future__ import annotations

NAMES = tuple(
    """Ada Abel Alma Amir Anna Arno Bea Ben Berta Bilal Cara Cleo Clara Dan Dario Dora Edda Elias Elsa Emil Erik Eva Farid
    Felix Finn Flora Frida Gina Greta Gustav Hanna Hugo Ida Ines Iris Ivan Jan Jonas Judith Kamal Karl Kira Lara Lea Leo
    Lina Luca Mara Marie Max Mila Mona Nadia Nils Nora Olga Omar Oscar Otto Paul Petra Pia Rita Robin Rosa Sami Sara Silas
    Sofia Sven Tara Theo Tilda Uwe Vera Victor Wanda Yara Yusuf Zita""".split()
)
PRODUCTS = tuple(
    """Lamp Desk Chair Clock Radio Kettle Mirror Carpet Vase Shelf Basket Blanket Bottle Bucket Candle Drum Easel Frame
    Guitar Hammer Helmet Jacket Ladder Mug Pillow Rake Scarf Teapot Toaster Wallet""".split()
)
CITIES = ("Oslo", "Rome", "Paris", "Lima", "Cairo", "Quito", "Delhi", "Tokyo", "Bonn", "Kyiv", "Doha", "Riga")
STATUSES = ("pending", "shipped", "delivered")
FIRST_ORDER, LAST_ORDER = 1000, 9999
