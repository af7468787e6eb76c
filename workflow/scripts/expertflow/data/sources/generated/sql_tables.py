"""The world that generated SQL questions are about: ten pairs of tables, a child and its parent."""

from msgspec import Struct

from expertflow.data.sources.generated.words import ADJECTIVES, CITIES, COUNTRIES, GIVEN_NAMES


class Column(Struct, frozen=True, kw_only=True):
    """A column and how people call it. Text columns list their values; numbers have a range."""

    name: str
    phrases: tuple[str, ...]
    values: tuple[str, ...] = ()
    low: int = 0
    high: int = 0
    step: int = 1

    @property
    def is_text(self) -> bool:
        """Say whether the column holds text rather than whole numbers."""
        return bool(self.values)


class Table(Struct, frozen=True, kw_only=True):
    """A table: ``label`` is the column that names a row, ``key`` the one that names its parent."""

    name: str
    nouns: tuple[str, ...]
    label: Column
    columns: tuple[Column, ...]
    key: str = ""

    @property
    def texts(self) -> tuple[Column, ...]:
        """List the text columns that have few values."""
        return tuple(column for column in self.columns if column.is_text)

    @property
    def numbers(self) -> tuple[Column, ...]:
        """List the columns of numbers."""
        return tuple(column for column in self.columns if not column.is_text)

    @property
    def ddl(self) -> str:
        """Write the table's definition as one compact line."""
        parts = ["id INTEGER", f"{self.label.name} TEXT"]
        parts += [f"{c.name} {'TEXT' if c.is_text else 'INTEGER'}" for c in self.columns]
        parts += [f"{self.key} INTEGER"] if self.key else []
        return f"CREATE TABLE {self.name} ({', '.join(parts)})"


class Domain(Struct, frozen=True, kw_only=True):
    """Two tables that can be joined: each child row belongs to one parent row."""

    parent: Table
    child: Table


def _text(name: str, values: tuple[str, ...], *phrases: str) -> Column:
    return Column(name=name, phrases=phrases or (name,), values=values)


def _number(name: str, span: tuple[int, int, int], *phrases: str) -> Column:
    low, high, step = span
    return Column(name=name, phrases=phrases or (name,), low=low, high=high, step=step)


def _table(
    name: str, nouns: tuple[str, ...], label: Column, *columns: Column, key: str = ""
) -> Table:
    return Table(name=name, nouns=nouns, label=label, columns=columns, key=key)


_PERSON = _text("name", GIVEN_NAMES)
_NAME, _TITLE = _text("name", ADJECTIVES), _text("title", ADJECTIVES)
_CITY, _COUNTRY = _text("city", CITIES), _text("country", COUNTRIES)
_BORN = _number("born", (1940, 1990, 5), "birth year")
_YEAR = (1990, 2025, 5)

DOMAINS: tuple[Domain, ...] = (
    Domain(
        parent=_table(
            "departments",
            ("departments",),
            _NAME,
            _CITY,
            _number("budget", (100, 900, 50)),
            _number("floor", (1, 9, 1)),
        ),
        child=_table(
            "employees",
            ("employees", "staff members", "workers"),
            _PERSON,
            _text("role", ("analyst", "clerk", "driver", "engineer", "manager"), "role", "job"),
            _number("age", (20, 65, 5)),
            _number("salary", (30, 120, 5), "salary", "pay"),
            key="department_id",
        ),
    ),
    Domain(
        parent=_table(
            "directors",
            ("directors", "film makers"),
            _PERSON,
            _COUNTRY,
            _BORN,
            _number("awards", (0, 9, 1), "award count"),
        ),
        child=_table(
            "films",
            ("films", "movies"),
            _TITLE,
            _text("genre", ("comedy", "crime", "drama", "horror", "western"), "genre", "kind"),
            _number("year", _YEAR, "year", "release year"),
            _number("rating", (1, 10, 1), "rating", "score"),
            _number("minutes", (80, 180, 10), "running time", "length"),
            key="director_id",
        ),
    ),
    Domain(
        parent=_table(
            "customers",
            ("customers", "clients", "buyers"),
            _PERSON,
            _CITY,
            _text("tier", ("basic", "silver", "gold"), "tier", "plan"),
            _number("points", (0, 400, 20)),
        ),
        child=_table(
            "orders",
            ("orders", "purchases"),
            _text("product", ADJECTIVES),
            _text("status", ("open", "paid", "shipped", "returned"), "status", "state"),
            _number("quantity", (1, 20, 1), "quantity", "size"),
            _number("total", (20, 400, 20), "total", "amount"),
            key="customer_id",
        ),
    ),
    Domain(
        parent=_table("authors", ("authors", "writers"), _PERSON, _COUNTRY, _BORN),
        child=_table(
            "books",
            ("books", "novels"),
            _TITLE,
            _text("language", ("Danish", "English", "French", "German", "Italian")),
            _number("pages", (50, 800, 50), "page count", "length"),
            _number("price", (5, 60, 5), "price", "cost"),
            _number("year", _YEAR, "year", "publication year"),
            key="author_id",
        ),
    ),
    Domain(
        parent=_table(
            "teams",
            ("teams", "clubs"),
            _NAME,
            _CITY,
            _number("founded", (1900, 2000, 10), "founding year"),
            _number("wins", (0, 40, 5), "win count"),
        ),
        child=_table(
            "players",
            ("players",),
            _PERSON,
            _text("position", ("defender", "forward", "goalkeeper", "midfielder")),
            _number("age", (15, 40, 5)),
            _number("goals", (0, 30, 2), "goal count", "goals"),
            key="team_id",
        ),
    ),
    Domain(
        parent=_table(
            "suppliers",
            ("suppliers", "vendors"),
            _NAME,
            _COUNTRY,
            _number("rating", (1, 10, 1), "rating", "score"),
        ),
        child=_table(
            "products",
            ("products", "articles", "goods"),
            _NAME,
            _text("category", ("furniture", "garden", "kitchen", "lighting", "toys")),
            _text("color", ("black", "blue", "green", "red", "white"), "color", "colour"),
            _number("price", (10, 200, 10), "price", "cost"),
            _number("stock", (0, 300, 20)),
            key="supplier_id",
        ),
    ),
    Domain(
        parent=_table(
            "airports",
            ("airports",),
            _NAME,
            _COUNTRY,
            _number("runways", (1, 6, 1), "runway count"),
            _number("gates", (10, 90, 5), "gate count"),
        ),
        child=_table(
            "flights",
            ("flights", "connections"),
            _text("carrier", ADJECTIVES),
            _text("destination", CITIES),
            _number("delay", (0, 90, 5)),
            _number("seats", (50, 300, 50), "seat count", "seats"),
            _number("fare", (50, 400, 50), "fare", "price"),
            key="airport_id",
        ),
    ),
    Domain(
        parent=_table(
            "doctors",
            ("doctors", "physicians"),
            _PERSON,
            _text("field", ("cardiology", "neurology", "surgery", "pediatrics")),
            _number("experience", (2, 34, 2)),
        ),
        child=_table(
            "patients",
            ("patients",),
            _PERSON,
            _CITY,
            _text("ward", ("north", "south", "east", "west"), "ward", "wing"),
            _number("age", (5, 90, 5)),
            _number("visits", (1, 20, 1), "visit count", "visits"),
            key="doctor_id",
        ),
    ),
    Domain(
        parent=_table(
            "schools",
            ("schools",),
            _NAME,
            _CITY,
            _text("level", ("primary", "middle", "high")),
            _number("rooms", (5, 60, 5), "room count"),
        ),
        child=_table(
            "students",
            ("students", "pupils"),
            _PERSON,
            _text("sport", ("chess", "hockey", "judo", "rowing", "tennis")),
            _number("grade", (1, 12, 1)),
            _number("absences", (0, 30, 2), "absence count", "absences"),
            key="school_id",
        ),
    ),
    Domain(
        parent=_table(
            "artists",
            ("artists", "musicians", "singers"),
            _PERSON,
            _COUNTRY,
            _text("label", ("Apex", "Delta", "Nova", "Orbit"), "label", "record label"),
            _number("albums", (1, 15, 1), "album count"),
        ),
        child=_table(
            "songs",
            ("songs", "tracks"),
            _TITLE,
            _text("style", ("blues", "folk", "jazz", "metal", "pop")),
            _number("seconds", (100, 400, 20), "duration", "length"),
            _number("plays", (0, 900, 50), "play count", "plays"),
            _number("year", _YEAR, "year", "release year"),
            key="artist_id",
        ),
    ),
)
