"""The schema of generated SQL questions: ten pairs of tables, a child and its parent."""

import re

from msgspec import Struct

from expertflow.data.sources.generated.generator import Property, parse_properties

# A parent and its child table: nouns for its rows, the first being its name, and its columns. A
# column is ``name: phrases = values``; the first one names a row.
_TABLES = """
departments
    name = adjectives; city = cities; budget = 100 to 900 by 50; floor = 1 to 9 by 1
employees, staff members, workers
    name = given names; role: role, job = analyst, clerk, driver, engineer, manager
    age = 20 to 65 by 5; salary: salary, pay = 30 to 120 by 5

directors, film makers
    name = given names; country = countries; born: birth year = 1940 to 1990 by 5
    awards: award count = 0 to 9 by 1
films, movies
    title = adjectives; genre: genre, kind = comedy, crime, drama, horror, western
    year: year, release year = 1990 to 2025 by 5; rating: rating, score = 1 to 10 by 1
    minutes: running time, length = 80 to 180 by 10

customers, clients, buyers
    name = given names; city = cities; tier: tier, plan = basic, silver, gold
    points = 0 to 400 by 20
orders, purchases
    product = adjectives; status: status, state = open, paid, shipped, returned
    quantity: quantity, size = 1 to 20 by 1; total: total, amount = 20 to 400 by 20

authors, writers
    name = given names; country = countries; born: birth year = 1940 to 1990 by 5
books, novels
    title = adjectives; language = Danish, English, French, German, Italian
    pages: page count, length = 50 to 800 by 50; price: price, cost = 5 to 60 by 5
    year: year, publication year = 1990 to 2025 by 5

teams, clubs
    name = adjectives; city = cities; founded: founding year = 1900 to 2000 by 10
    wins: win count = 0 to 40 by 5
players
    name = given names; position = defender, forward, goalkeeper, midfielder
    age = 15 to 40 by 5; goals: goal count, goals = 0 to 30 by 2

suppliers, vendors
    name = adjectives; country = countries; rating: rating, score = 1 to 10 by 1
products, articles, goods
    name = adjectives; category = furniture, garden, kitchen, lighting, toys
    color: color, colour = black, blue, green, red, white
    price: price, cost = 10 to 200 by 10; stock = 0 to 300 by 20

airports
    name = adjectives; country = countries; runways: runway count = 1 to 6 by 1
    gates: gate count = 10 to 90 by 5
flights, connections
    carrier = adjectives; destination = cities; delay = 0 to 90 by 5
    seats: seat count, seats = 50 to 300 by 50; fare: fare, price = 50 to 400 by 50

doctors, physicians
    name = given names; field = cardiology, neurology, surgery, pediatrics
    experience = 2 to 34 by 2
patients
    name = given names; city = cities; ward: ward, wing = north, south, east, west
    age = 5 to 90 by 5; visits: visit count, visits = 1 to 20 by 1

schools
    name = adjectives; city = cities; level = primary, middle, high
    rooms: room count = 5 to 60 by 5
students, pupils
    name = given names; sport = chess, hockey, judo, rowing, tennis
    grade = 1 to 12 by 1; absences: absence count, absences = 0 to 30 by 2

artists, musicians, singers
    name = given names; country = countries; label: label, record label = Apex, Delta, Nova, Orbit
    albums: album count = 1 to 15 by 1
songs, tracks
    title = adjectives; style = blues, folk, jazz, metal, pop
    seconds: duration, length = 100 to 400 by 20; plays: play count, plays = 0 to 900 by 50
    year: year, release year = 1990 to 2025 by 5
"""


class Table(Struct, frozen=True):
    """A table: column ``label`` names a row, column ``key`` its parent."""

    nouns: tuple[str, ...]
    label: Property
    columns: tuple[Property, ...]
    key: str

    @property
    def name(self) -> str:
        return self.nouns[0]

    @property
    def texts(self) -> list[Property]:
        return [column for column in self.columns if not column.is_number]

    @property
    def numbers(self) -> list[Property]:
        return [column for column in self.columns if column.is_number]

    @property
    def ddl(self) -> str:
        parts = ["id INTEGER", f"{self.label.name} TEXT"]
        parts += [f"{c.name} {'INTEGER' if c.is_number else 'TEXT'}" for c in self.columns]
        parts += [f"{self.key} INTEGER"] if self.key else []
        return f"CREATE TABLE {self.name} ({', '.join(parts)})"


class Domain(Struct, frozen=True):
    parent: Table
    child: Table

    @property
    def join(self) -> str:
        parent, child = self.parent.name, self.child.name
        return f"{child} JOIN {parent} ON {child}.{self.child.key} = {parent}.id"


def _table(text: str, key: str = "") -> Table:
    names, _, listed = text.partition("\n")
    label, *columns = parse_properties(listed)
    return Table(tuple(names.split(", ")), label, tuple(columns), key)


def _domain(text: str) -> Domain:
    first, second = re.split(r"\n(?=\w)", text)
    parent = _table(first)
    return Domain(parent, _table(second, key=f"{parent.name.removesuffix('s')}_id"))


DOMAINS = tuple(_domain(text) for text in _TABLES.strip().split("\n\n"))
