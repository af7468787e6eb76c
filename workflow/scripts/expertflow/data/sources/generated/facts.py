"""Generate a few plain facts as questions and answers, for a run on 25 records."""

from functools import partial
from random import Random

from expertflow.data.records import Fields
from expertflow.data.sources.generated import generator

FACTS: tuple[tuple[str, str], ...] = (
    ("How many days are in a week?", "A week has seven days."),
    ("How many months are in a year?", "A year has twelve months."),
    ("How many minutes are in an hour?", "An hour has sixty minutes."),
    ("How many legs has a spider?", "A spider has eight legs."),
    ("How many legs has an ant?", "An ant has six legs."),
    ("How many sides has a hexagon?", "A hexagon has six sides."),
    ("How many corners has a triangle?", "A triangle has three corners."),
    ("How many bits are in a byte?", "A byte has eight bits."),
    ("How many planets orbit the Sun?", "Eight planets orbit the Sun."),
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What is the capital of Norway?", "The capital of Norway is Oslo."),
    ("What is the capital of Italy?", "The capital of Italy is Rome."),
    ("What is the capital of Spain?", "The capital of Spain is Madrid."),
    ("What is the capital of Austria?", "The capital of Austria is Vienna."),
    ("What is the capital of Japan?", "The capital of Japan is Tokyo."),
    ("What is the capital of Egypt?", "The capital of Egypt is Cairo."),
    ("What is the capital of Peru?", "The capital of Peru is Lima."),
    ("What is the largest planet?", "The largest planet is Jupiter."),
    ("What is the largest ocean?", "The largest ocean is the Pacific."),
    ("What is the chemical symbol of gold?", "The chemical symbol of gold is Au."),
    ("What is the chemical symbol of iron?", "The chemical symbol of iron is Fe."),
    ("What is the chemical symbol of sodium?", "The chemical symbol of sodium is Na."),
    ("What is frozen water called?", "Frozen water is called ice."),
    ("What do bees make?", "Bees make honey."),
    ("What gas do plants take in?", "Plants take in carbon dioxide."),
    ("At what temperature does water boil?", "Water boils at 100 degrees Celsius."),
    ("Which planet is closest to the Sun?", "Mercury is closest to the Sun."),
    ("Which metal is liquid at room temperature?", "Mercury is liquid at room temperature."),
    ("Which animal is the tallest?", "The giraffe is the tallest animal."),
    ("Which colors give green when mixed?", "Blue and yellow give green."),
)


def make_record(rng: Random) -> Fields:
    question, answer = rng.choice(FACTS)
    return {"question": question, "answer": answer}


generate = partial(generator.generate_records, make_record)
