"""Training prompts from templates: sentences with blanks, filled at random from a seed. Pure.

They cover the same kinds of tasks as the shipped scenarios, without any scenario's prompt: those
are held out.
"""

from collections.abc import Iterator
from random import Random
from string import Formatter

from nwor_bench.errors import ConfigError
from nwor_bench.workload.prompts import Prompt

_WORDS: dict[str, tuple[str, ...]] = {
    "name": ("Amara", "Boris", "Chiara", "Daniel", "Elif", "Farah", "Goran", "Hanna", "Ivo",
             "Jun", "Katja", "Luis", "Mei", "Nadia", "Omar", "Petra", "Quentin", "Rosa", "Sami",
             "Tove", "Uma", "Viktor", "Wanda", "Yusuf", "Zoe"),
    "place": ("Lyon", "Nairobi", "Quito", "Tampere", "Hanoi", "Leeds", "Porto", "Izmir", "Cork",
              "Perth", "Basel", "Kyoto", "Lima", "Gdansk", "Bergen", "Tunis", "Austin", "Riga"),
    "job": ("a nurse", "a bus driver", "a baker", "an electrician", "a primary school teacher",
            "a beekeeper", "a sound engineer", "a librarian", "a roofer", "a pharmacist",
            "a translator", "a lifeguard", "a florist", "a train driver", "a data analyst"),
    "thing": ("a bicycle", "a tent", "a coffee grinder", "a pair of boots", "a desk lamp",
              "a violin", "a winter coat", "a backpack", "a toaster", "a sewing machine",
              "a telescope", "a kayak", "a rice cooker", "a garden hose", "an umbrella"),
    "topic": ("tides", "vaccines", "compound interest", "volcanoes", "the water cycle", "bees",
              "black holes", "inflation", "photosynthesis", "earthquakes", "glaciers", "magnets",
              "the ozone layer", "soil", "rainbows", "antibiotics", "batteries", "coral reefs",
              "the printing press", "migration of birds", "time zones", "recycling", "sleep"),
    "skill": ("play the guitar", "swim", "bake bread", "draw portraits", "speak Italian",
              "repair bicycles", "write short stories", "play chess", "grow tomatoes", "knit",
              "take better photographs", "cook for ten people", "juggle", "read faster"),
    "trouble": ("my sink drips all night", "my laptop gets hot", "my houseplant has yellow leaves",
                "I cannot fall asleep", "my bread does not rise", "my bicycle chain squeaks",
                "I keep forgetting names", "my soup is too salty", "my cat wakes me at five",
                "my phone runs out of power by noon", "I am always late for work"),
    "creature": ("a fox", "an owl", "a snail", "a dragon", "a lonely robot", "a whale", "a spider",
                 "a young cloud", "a hedgehog", "a paper boat", "a grumpy bear", "two mice"),
    "setting": ("in a library", "on a night train", "under the sea", "in a small bakery",
                "on the moon", "in an old clock tower", "at a market", "in a snowstorm",
                "behind a waterfall", "in a museum after closing time"),
    "language": ("Python", "JavaScript", "Java", "C", "Go", "Rust", "Ruby", "TypeScript"),
    "task": ("counts the vowels in a text", "returns the largest of three numbers",
             "checks whether a word is a palindrome", "removes duplicates from a list",
             "converts Celsius to Fahrenheit", "finds the second smallest number in a list",
             "computes the factorial of n", "merges two sorted lists", "reverses a number",
             "counts how often each word occurs in a text", "sums the digits of a number",
             "tells whether a year is a leap year", "flattens a nested list",
             "computes the average of a list", "finds all prime numbers below n",
             "rotates a list by k places", "checks whether brackets are balanced",
             "finds the longest word in a sentence", "turns seconds into hours and minutes"),
    "concept": ("recursion", "a hash table", "inheritance", "a race condition", "a closure",
                "unit tests", "an iterator", "garbage collection", "a linked list", "a mutex",
                "version control", "a foreign key", "an index of a database", "caching"),
    "tongue": ("French", "German", "Spanish", "Italian", "Portuguese", "Dutch"),
    "plain": ("The library opens at nine and closes at six.", "My brother lost his keys again.",
              "Please bring an umbrella, it may rain.", "The soup needs a little more salt.",
              "We missed the last train and walked home.", "How much does this chair cost?",
              "The children are playing in the garden.", "I would like a table for two.",
              "She has worked here for seven years.", "Where is the nearest pharmacy?",
              "The meeting was moved to Thursday.", "He reads the newspaper every morning.",
              "Our neighbours have a very old dog.", "Turn left after the bridge."),
    "news": ("The town council voted to close the old bridge for repairs. The work begins in "
             "March and will take eight months. Drivers must use the ring road, and a free bus "
             "will take people across the river every twenty minutes.",
             "A new study followed two thousand people who walk to work. They slept longer and "
             "were ill less often than those who drive. The authors warn that people who walk "
             "may also live in healthier places.",
             "The museum received a gift of forty paintings from a family that wants to stay "
             "unnamed. Half of them have never been shown. An exhibition is planned for autumn, "
             "once the frames have been cleaned.",
             "Farmers in the valley harvested fewer apples than last year because of a late "
             "frost in April. Prices rose by a fifth. Growers now test fans and small heaters "
             "that protect the blossoms at night.",
             "The school swapped its long summer break for three shorter ones. Teachers say "
             "that pupils forget less. Some parents find it hard to plan holidays, and the "
             "school will ask everyone again in a year.",
             "After a storm the harbour was full of driftwood. Volunteers cleared it in two "
             "days. An artist offered to turn the largest trunk into a bench for the pier."),
    "goods": ("pencils", "apples", "notebooks", "tiles", "candles", "eggs", "bottles", "stamps"),
    "tone": ("friendly", "formal", "funny", "short", "calm", "enthusiastic"),
}  # fmt: skip

_TEMPLATES: dict[str, tuple[str, ...]] = {
    "chat": (
        "I am {job} in {place} and {trouble}. What should I try first?",
        "Explain {topic} to a child of {small} years.",
        "What are {small} interesting facts about {topic}?",
        "I want to learn how to {skill}. Make me a plan for {small} weeks.",
        "Write a {tone} message to {name}, who sold me {thing} that broke after {small} days.",
        "Tell a story of about {many} words about {creature} {setting}.",
        "Write a short poem about {creature} {setting}.",
        "My friend {name} is {job} and has a birthday soon. Is {thing} a good gift? Why?",
        "Compare {topic} and {topic2} in a few sentences.",
        "What should I see if I have {small} days in {place}?",
        "Write a dialogue between {name} and {creature} {setting}.",
        "Give me {small} tips to {skill} when there is little time.",
        "What does {job} do on an ordinary day?",
        "Is it better to buy or to borrow {thing}? Give reasons for both.",
    ),
    "code": (
        "Write a {language} function that {task}.",
        "Write a {language} function that {task}, and explain how it works.",
        "Write a program in {language} that reads lines from a file and {task}.",
        "Explain {concept} to someone who has just begun with {language}.",
        "How do I test a {language} function that {task}? Show an example.",
        "What is the difference between {concept} and {concept2}?",
        "Write a {language} class for {thing} with {small} useful methods.",
        "Write an SQL query that lists the {small} customers in {place} who bought the most "
        "{goods}.",
    ),
    "maths": (
        "{name} buys {many} {goods} at {small} cents each and pays with {more} cents. How much "
        "is left?",
        "A train covers {more} km in {small} hours. How far does it go in {small2} hours?",
        "What is {many} percent of {more}? Show the steps.",
        "Solve for x: {small}x + {many} = {more}.",
        "A box holds {small} rows of {many} {goods}. {name} takes out {small2}. How many are left?",
        "What is the area of a rectangle of {many} m by {small} m, and its perimeter?",
        "{name} is {small} years older than {name2}. Together they are {more} years old. How old "
        "is each?",
        "Explain how to add {small}/{many} and {small2}/{many}.",
    ),
    "retrieval": (
        "{name} is {job} and lives in {place}. {name2} is {job2} and lives in {place2}. "
        "Who lives in {place2}, and what is that person's job?",
        "Price list: {goods} {small} euros, {thing} {many} euros, {thing2} {more} euros. "
        "What does {thing2} cost?",
        "Read the text and say who did what: {name} repaired {thing} {setting}. {name2} only "
        "watched and talked about {topic}.",
        "Text: {news} Question: what was decided or planned, and by whom?",
        "Text: {news} Question: which numbers are in the text, and what do they count?",
    ),
    "summarising": (
        "Summarise in one sentence: {news}",
        "Write a headline for this: {news}",
        "List the main points of this text: {news} {news2}",
        "Rewrite this in a {tone} tone: {news}",
        "Summarise for {job}: {news} {plain}",
    ),
    "translation": (
        "Translate into {tongue}: {plain}",
        "Translate into {tongue}: {plain} {plain2}",
        "How do you say this in {tongue}, in a {tone} way? {plain}",
        "Translate into {tongue} and explain each word: {plain}",
    ),
}

_AROUND = (
    'Summarise in one sentence: "{text}"',
    'Summarise this for {job}: "{text}"',
    'Write a headline for this: "{text}"',
    'Turn this into {small} key words: "{text}"',
    'Rewrite this in a {tone} tone: "{text}"',
    'Translate into {tongue}: "{text}"',
    'Translate into {tongue}, in a {tone} way: "{text}"',
    'Correct the mistakes in this message: "{text}"',
    "{text}\n\nQuestion: which names and numbers are in this text?",
    'Message from {name}: "{text}" Question: what does {name} want?',
)
"""Tasks about a given text."""

_NUMBERS = {"small": (2, 12), "many": (13, 99), "more": (120, 990)}


def training_prompts(count: int, seed: int) -> list[Prompt]:
    """`count` different prompts, alternating categories; the first n are the same for any count.

    Raises ConfigError if the templates give fewer.
    """
    found: dict[str, None] = {}
    for text in _texts(seed, attempts=20 * count):
        found[text] = None
        if len(found) == count:
            return [Prompt(f"template-{i}", "training", text) for i, text in enumerate(found)]
    raise ConfigError.at(
        "--tokens",
        f"the templates gave {len(found)} different prompts of {count}; write a smaller number",
    )


def around(text: str, random: Random) -> str:
    """A task about the text: summarise, translate, or find something in it."""
    template = random.choice(_AROUND)
    return template.format(**_fill(template, random, text=text))


def _texts(seed: int, attempts: int) -> Iterator[str]:
    random = Random(f"templates:{seed}")
    categories = sorted(_TEMPLATES)
    for number in range(attempts):
        template = random.choice(_TEMPLATES[categories[number % len(categories)]])
        yield template.format(**_fill(template, random))


def _fill(template: str, random: Random, **filled: str) -> dict[str, str]:
    """A word or number for each blank; a blank ending in 2 differs from the one without."""
    for _, blank, _, _ in Formatter().parse(template):
        if blank and blank not in filled:
            kind = blank.removesuffix("2")
            filled[blank] = _word(kind, random, other_than=filled.get(kind))
    return filled


def _word(kind: str, random: Random, other_than: str | None) -> str:
    while True:
        if kind in _NUMBERS:
            word = str(random.randint(*_NUMBERS[kind]))
        else:
            word = random.choice(_WORDS[kind])
        if word != other_than:
            return word
