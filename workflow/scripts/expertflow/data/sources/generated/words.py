"""Names and words that several generators draw from."""

CITIES = ("Lyon", "Oslo", "Porto", "Turin", "Graz", "Ghent", "Bergen", "Malaga")
COUNTRIES = ("France", "Norway", "Portugal", "Italy", "Austria", "Belgium", "Spain", "Chile")
GIVEN_NAMES = (
    *("Ada", "Ben", "Clara", "David", "Elena", "Felix", "Grace", "Hugo", "Ines", "Jonas"),
    *("Karin", "Leo", "Maria", "Nils", "Olga", "Pedro", "Rosa", "Simon", "Tara", "Victor"),
)
FAMILY_NAMES = (
    *("Adler", "Berg", "Costa", "Dahl", "Evans", "Fischer", "Garcia", "Hansen", "Ito", "Jensen"),
    *("Keller", "Lopez", "Moreau", "Novak", "Olsen"),
    *("Pereira", "Rossi", "Silva", "Tanaka", "Weber"),
)
ADJECTIVES = (
    *("Amber", "Blue", "Calm", "Distant", "Early", "Frozen", "Golden", "Hidden", "Iron", "Jade"),
    *("Last", "Misty", "Northern", "Open", "Quiet", "Red", "Silent", "Tall", "Urban", "Wild"),
)
NOUNS = (
    *("Arrow", "Bridge", "Castle", "Dream", "Echo", "Forest", "Garden", "Harbor", "Island", "Joy"),
    *("Lantern", "Mirror", "Night", "Ocean", "Path", "River", "Stone", "Tower", "Valley", "Wind"),
)
