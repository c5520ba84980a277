"""Writes the training text of the demo model: short chats made from templates and slots.

Every item has a key that names its combination of template and slots. A hash of the key assigns
one key in eight to the held-out side. Training never sees a held-out combination, and the held-out
questions use nothing else.
"""

import hashlib
import random
from dataclasses import dataclass, field

HELD_OUT_ONE_IN = 8


def is_held_out(key):
    if key.startswith(("plain: ", "held out: ")):
        return key.startswith("held out: ")
    return int.from_bytes(hashlib.md5(key.encode()).digest()[:4], "little") % HELD_OUT_ONE_IN == 0


def normal(text):
    """Returns the question in lower case with letters, digits and operators only.

    Two questions with the same result count as the same question.
    """
    kept = "".join(c if c.isalnum() or c in "+-*/=" else " " for c in text.lower())
    return " ".join(kept.split())


@dataclass
class Item:
    category: str
    key: str
    question: str
    answer: str
    # Right is an answer that has all strings (in lower case) of one of these lists.
    accept: list
    topic: str = ""                 # For "You asked about <topic>."
    value: object = None            # A number or a word for follow-up questions.
    reject: list = field(default_factory=list)


# ---------------------------------------------------------------- facts

CAPITALS = dict(line.split(":") for line in """France:Paris
Italy:Rome
Spain:Madrid
Germany:Berlin
Portugal:Lisbon
England:London
Scotland:Edinburgh
Wales:Cardiff
Ireland:Dublin
Norway:Oslo
Sweden:Stockholm
Finland:Helsinki
Denmark:Copenhagen
Iceland:Reykjavik
Poland:Warsaw
Austria:Vienna
Hungary:Budapest
Greece:Athens
Belgium:Brussels
the Netherlands:Amsterdam
Switzerland:Bern
Russia:Moscow
Ukraine:Kyiv
Romania:Bucharest
Bulgaria:Sofia
Croatia:Zagreb
Serbia:Belgrade
the Czech Republic:Prague
Turkey:Ankara
Egypt:Cairo
Kenya:Nairobi
Ghana:Accra
Morocco:Rabat
Ethiopia:Addis Ababa
Nigeria:Abuja
Senegal:Dakar
Tunisia:Tunis
Japan:Tokyo
China:Beijing
India:New Delhi
Thailand:Bangkok
Vietnam:Hanoi
South Korea:Seoul
Indonesia:Jakarta
Nepal:Kathmandu
Iran:Tehran
Iraq:Baghdad
the Philippines:Manila
Canada:Ottawa
the United States:Washington
Mexico:Mexico City
Cuba:Havana
Brazil:Brasilia
Argentina:Buenos Aires
Chile:Santiago
Peru:Lima
Colombia:Bogota
Uruguay:Montevideo
Australia:Canberra
New Zealand:Wellington""".split("\n"))

EUROPE = """
France Italy Spain Germany Portugal England Scotland Wales Ireland Norway Sweden Finland Denmark
Iceland Poland Austria Hungary Greece Belgium Switzerland Ukraine Romania Bulgaria Croatia Serbia
""".split() + ["the Netherlands", "the Czech Republic"]
CONTINENTS = {c: "Europe" for c in EUROPE}
CONTINENTS |= {c: "Africa"
    for c in "Egypt Kenya Ghana Morocco Ethiopia Nigeria Senegal Tunisia".split()}
CONTINENTS |= {c: "Asia" for c in ["Japan", "China", "India", "Thailand", "Vietnam", "South Korea",
    "Nepal", "Iran", "Iraq", "the Philippines"]}
CONTINENTS |= {c: "North America" for c in ["Canada", "the United States", "Mexico", "Cuba"]}
CONTINENTS |= {c: "South America" for c in "Brazil Argentina Chile Peru Colombia Uruguay".split()}

LANGUAGES = {"France": "French", "Italy": "Italian", "Spain": "Spanish", "Germany": "German",
    "Portugal": "Portuguese", "England": "English",
             "Norway": "Norwegian", "Sweden": "Swedish", "Finland": "Finnish", "Denmark": "Danish",
             "Iceland": "Icelandic", "Poland": "Polish",
             "Austria": "German", "Hungary": "Hungarian", "Greece": "Greek",
             "the Netherlands": "Dutch", "Russia": "Russian", "Turkey": "Turkish",
             "Japan": "Japanese", "China": "Chinese", "Thailand": "Thai", "Vietnam": "Vietnamese",
             "South Korea": "Korean", "Mexico": "Spanish",
             "Brazil": "Portuguese", "Argentina": "Spanish", "Chile": "Spanish", "Cuba": "Spanish",
             "Australia": "English", "Egypt": "Arabic"}

OPPOSITE_PAIRS = [p.split("/") for p in """
hot/cold big/small fast/slow up/down day/night happy/sad good/bad old/young rich/poor light/dark
long/short high/low open/closed early/late hard/soft full/empty wet/dry clean/dirty strong/weak
loud/quiet left/right front/back top/bottom inside/outside first/last begin/end buy/sell give/take
push/pull win/lose love/hate yes/no true/false near/far thick/thin wide/narrow deep/shallow
heavy/weightless sweet/sour brave/cowardly easy/difficult cheap/expensive safe/dangerous
smooth/rough sharp/blunt friend/enemy start/stop come/go always/never everything/nothing
before/after above/below more/less north/south east/west summer/winter man/woman boy/girl
king/queen brother/sister laugh/cry remember/forget question/answer polite/rude awake/asleep
alive/dead arrive/leave
""".split()]
OPPOSITES = {}
for _a, _b in OPPOSITE_PAIRS:
    OPPOSITES[_a], OPPOSITES[_b] = _b, _a

SYNONYMS = dict(p.split("/") for p in """
large/big tiny/small quick/fast glad/happy unhappy/sad begin/start finish/end smart/clever
wealthy/rich shout/yell silent/quiet simple/easy correct/right wrong/incorrect scared/afraid
angry/mad pretty/beautiful tired/sleepy strange/odd speak/talk choose/pick gift/present
infant/baby road/street help/assist sick/ill
""".split())

PLURALS = dict(p.split("/") for p in """
cat/cats dog/dogs child/children mouse/mice tooth/teeth foot/feet man/men woman/women goose/geese
box/boxes bus/buses leaf/leaves knife/knives wolf/wolves baby/babies city/cities book/books
house/houses apple/apples tree/trees fish/fish sheep/sheep star/stars bird/birds flower/flowers
key/keys potato/potatoes tomato/tomatoes story/stories glass/glasses wife/wives shelf/shelves
person/people day/days country/countries
""".split())

PASTS = dict(p.split("/") for p in """
go/went eat/ate see/saw run/ran drink/drank write/wrote sing/sang swim/swam give/gave take/took
come/came make/made buy/bought think/thought bring/brought find/found sleep/slept speak/spoke
break/broke drive/drove fly/flew grow/grew know/knew walk/walked play/played jump/jumped
look/looked help/helped talk/talked cook/cooked
""".split())

COLOURS = {}
for _line in """blue: the sky, the sea, a blueberry, a sapphire
green: grass, a frog, a leaf, a lime, a cucumber, spinach, an emerald, a pea, a cactus
yellow: a banana, a lemon, the sun, a chick, a sunflower, butter, a canary
red: a strawberry, a tomato, blood, a ruby, a cherry, a fire engine, a stop sign, a ladybird
orange: an orange, a carrot, a pumpkin, a tangerine, an apricot
white: snow, milk, a cloud, salt, a swan, a polar bear, rice, cotton
black: coal, a crow, the night sky, a raven, tar, a black cat
brown: chocolate, coffee, wood, soil, a chestnut, a bear
grey: an elephant, ash, a rainy sky, a dolphin, a mouse
pink: a flamingo, a pig
purple: an aubergine, a plum, lavender, a violet""".split("\n"):
    _colour, _things = _line.split(": ")
    COLOURS |= {t: _colour for t in _things.split(", ")}
MIXES = {("red", "blue"): "purple", ("red", "yellow"): "orange", ("blue", "yellow"): "green",
    ("black", "white"): "grey",
         ("red", "white"): "pink"}

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = """
January February March April May June July August September October November December
""".split()
MONTH_DAYS = dict(zip(MONTHS, [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]))
ORDINALS = """
first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth
""".split()
NUMBER_WORDS = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
sixteen seventeen eighteen nineteen twenty
""".split()

SPELLING = """
cat dog house tree water bread apple school friend music table chair green yellow orange purple
happy river mountain window garden flower summer winter spring autumn monday friday sunday king
queen castle horse sheep rabbit tiger lion monkey elephant giraffe zebra snake eagle pigeon
chicken fish whale dolphin shark ship boat train plane bicycle car street city village country
island ocean beach sand stone gold silver iron paper pencil book letter number word story poem
song piano guitar drum dance doctor teacher farmer baker sister brother mother father baby child
family people heart hand foot head nose mouth tooth hair milk butter cheese egg sugar salt pepper
potato tomato carrot onion lemon banana cherry grape melon cake cookie honey soup rice night
morning evening star moon sun cloud rain snow wind storm fire light shadow dream sleep smile laugh
kitchen door floor roof wall bridge clock rust token model cache memory computer sterna
""".split()

SOUNDS = dict(p.split("/") for p in """
dog/bark cat/meow cow/moo sheep/baa duck/quack lion/roar horse/neigh pig/oink bee/buzz frog/croak
owl/hoot snake/hiss wolf/howl rooster/crow mouse/squeak bird/chirp
""".split())
YOUNG = dict(p.split("/") for p in """
dog/puppy cat/kitten cow/calf sheep/lamb duck/duckling horse/foal pig/piglet goat/kid hen/chick
frog/tadpole lion/cub bear/cub goose/gosling deer/fawn swan/cygnet kangaroo/joey
""".split())
LEGS = {"dog": 4, "cat": 4, "horse": 4, "cow": 4, "sheep": 4, "elephant": 4, "spider": 8, "ant": 6,
    "bee": 6, "fly": 6, "duck": 2, "hen": 2,
        "snake": 0, "fish": 0, "frog": 4, "pig": 4, "lion": 4, "octopus": 0, "chair": 4,
        "person": 2, "beetle": 6, "owl": 2, "goat": 4}
CLASSES = {}
for _line in """bird: eagle, owl, duck, penguin, sparrow, swan, pigeon, hen, parrot, robin, ostrich
mammal: dog, cat, whale, horse, cow, bat, dolphin, elephant, mouse, lion, bear, rabbit, monkey
fish: salmon, shark, tuna, trout, goldfish, cod
insect: ant, bee, butterfly, fly, beetle, ladybird
reptile: snake, lizard, crocodile, tortoise
fruit: apple, banana, cherry, grape, lemon, melon, pear, plum, strawberry
vegetable: carrot, onion, potato, cabbage, spinach, leek
musical instrument: piano, guitar, violin, drum, flute, trumpet, harp
tool: hammer, saw, spanner, screwdriver
colour: red, blue, green, purple, pink""".split("\n"):
    _class, _things = _line.split(": ")
    CLASSES |= {t: _class for t in _things.split(", ")}

NAMES = """
Anna Ben Clara David Emma Felix Grace Henry Ivy Jack Kate Leo Maria Noah Olivia Paul Rosa Sam Tara
Victor Wendy Yusuf Zoe Alice Bob Carlos Diana Erik Fatima George Hanna Ian Julia Karl Lina Marco
Nina Oscar Petra Quinn Ravi Sofia Tom Uma Vera Will Xena Yara Adam Bella Chris Dora Elena Frank
Gina Hugo Irene James Kim Laura Mike Nora Omar Peter Rita Simon Tina Lucy Martin Eva Max Sarah
John Mary Daniel Ella Lucas Mia Nadia Otto Ruth Theo Amir Chen Priya Kenji Ingrid Pablo Greta
""".split()
ANIMALS = ("fox cat dog rabbit bear mouse owl frog duck horse turtle penguin wolf sheep hedgehog "
           "squirrel lion elephant bird bee").split()
FOODS = ("pizza soup bread rice pasta cake cheese apples bananas chocolate salad honey pancakes "
         "potatoes ice cream").replace("ice cream", "ice_cream").split()
FOODS = [f.replace("_", " ") for f in FOODS]
PLAIN_COLOURS = "red blue green yellow orange purple pink black white brown grey".split()
CITIES = [c for c in CAPITALS.values()]
PETS = """
Rex Bella Max Luna Toby Daisy Milo Coco Rocky Lucky Ginger Fluffy Spot Oscar Nala Biscuit
""".split()
THINGS = ("apples oranges books coins pens cookies marbles stamps eggs balls cards shells sweets "
          "stickers cups").split()

# ---------------------------------------------------------------- terms: (names, is|are,
# definition, accept, why)

TERMS = [
    (["Sterna", "the Sterna engine"], "is",
     ("Sterna is a server for ternary language models. It is written in Rust and runs on ordinary "
      "CPUs."), [["rust", "cpu"]],
     "Sterna lets many people use a language model without a graphics card."),
    (["batching", "continuous batching", "request batching"], "is",
     ("Batching means that the server runs many requests together in one step, so each weight is "
      "read once for all of them."),
     [["requests together"]],
      ("Batching helps because the weights are read from memory once for all requests instead of "
       "once for each.")),
    (["paging", "a paged KV cache", "KV cache paging"], "is",
     ("Paging splits the KV cache into small pages of equal size, so memory is given out as it is "
      "needed and none is wasted."),
     [["cache", "pages"]],
      "Paging helps because no request has to reserve memory that it may never use."),
    (["prefix caching", "the prefix cache", "prefix sharing"], "is",
     ("Prefix caching keeps the work done for the start of a prompt, so another request with the "
      "same start can reuse it."),
     [["same start", "reuse"]],
      "Prefix caching helps because a shared prompt is computed only once."),
    (["ternary weights", "ternary numbers in a model"], "are",
     ("Ternary weights have only three values: minus one, zero and plus one. They need less than "
      "two bits each."),
     [["three values"]],
      "Ternary weights help because they are small and need only additions, not multiplications."),
    (["BitNet", "BitNet b1.58", "the BitNet architecture"], "is",
     ("BitNet is a kind of transformer whose weights are ternary. It is small in memory and fast "
      "on a CPU."),
     [["transformer", "ternary"]],
      "BitNet helps because a model with ternary weights needs little memory."),
    (["a KV cache", "the KV cache", "a key value cache"], "is",
     ("The KV cache stores the keys and values of earlier tokens, so they are not computed again "
      "for each new token."),
     [["keys and values"]], "The KV cache helps because earlier tokens are not computed again."),
    (["a token", "one token"], "is",
     ("A token is a small piece of text, such as a word or a part of a word. The model reads and "
      "writes tokens."), [["piece of text"]], None),
    (["a tokenizer", "the tokenizer"], "is",
     "A tokenizer cuts text into tokens and turns tokens back into text.", [["text into tokens"]],
     None),
    (["quantisation", "quantization"], "is",
     "Quantisation stores numbers with fewer bits, so a model takes less memory and runs faster.",
     [["fewer bits"]],
     "Quantisation helps because smaller numbers take less memory and less time to read."),
    (["a language model", "a large language model"], "is",
     ("A language model is a program that reads text and predicts the next token, one after "
      "another."), [["next token"]], None),
    (["a transformer", "the transformer"], "is",
     "A transformer is a neural network made of layers of attention and feed-forward blocks.",
     [["attention", "layers"]], None),
    (["attention", "self attention"], "is",
     "Attention lets each token look at the earlier tokens and take what it needs from them.",
     [["earlier tokens"]], None),
    (["grouped query attention", "GQA"], "is",
     ("Grouped query attention lets several query heads share one key and value head, so the KV "
      "cache is smaller."), [["share", "head"]],
     "Grouped query attention helps because the KV cache becomes smaller."),
    (["streaming", "token streaming"], "is",
     ("Streaming sends each token to the user as soon as it is made, so nobody has to wait for the "
      "whole answer."), [["as soon as"]],
     "Streaming helps because the user sees the first words at once."),
    (["a prompt", "the prompt"], "is",
     "A prompt is the text that you give to the model before it answers.", [["text that you give"]],
     None),
    (["temperature", "the temperature setting"], "is",
     ("Temperature sets how random the choice of the next token is. At zero the model always takes "
      "the most likely token."), [["random"]], None),
    (["greedy decoding", "greedy sampling"], "is",
     "Greedy decoding always picks the most likely next token.", [["most likely"]], None),
    (["latency", "low latency"], "is",
     "Latency is the time that one request has to wait for its answer.", [["time", "wait"]], None),
    (["throughput", "high throughput"], "is",
     "Throughput is the number of tokens that the server makes per second for all users together.",
     [["per second"]], None),
    (["a scheduler", "the scheduler"], "is",
     ("The scheduler decides which requests run in the next step and how many tokens each of them "
      "gets."), [["which requests"]], None),
    (["chunked prefill", "prefill in chunks"], "is",
     "Chunked prefill reads a long prompt in parts, so other requests do not have to wait for it.",
     [["parts"]],
     "Chunked prefill helps because a long prompt does not block the other requests."),
    (["prefill", "the prefill phase"], "is",
     ("Prefill is the phase in which the server reads the whole prompt before it writes the first "
      "token."), [["prompt"]], None),
    (["decoding", "the decode phase"], "is",
     "Decoding is the phase in which the model writes its answer, one token at a time.",
     [["one token at a time"]], None),
    (["preemption", "preempting a request"], "is",
     "Preemption stops a request for a while to free memory and continues it later.",
     [["continues it later"]], None),
    (["speculative decoding", "speculation"], "is",
     ("Speculative decoding guesses several tokens cheaply and lets the model check them in one "
      "step."), [["guesses", "check"]],
     "Speculative decoding helps because several tokens can be accepted in one step."),
    (["Rust", "the Rust language"], "is",
     "Rust is a programming language that is fast and safe with memory.",
     [["programming language"]], None),
    (["a CPU", "a processor"], "is", "A CPU is the main processor of a computer.",
     [["main processor"]], None),
    (["a GPU", "a graphics card"], "is",
     "A GPU is a processor made for graphics and parallel work. Sterna does not need one.",
     [["graphics"]], None),
    (["squared ReLU", "relu squared"], "is",
     ("Squared ReLU is an activation function: negative values become zero and positive values are "
      "squared."), [["negative", "squared"]], None),
    (["RMSNorm", "an RMSNorm layer"], "is",
     "RMSNorm divides a vector by its root mean square, so that its size stays steady.",
     [["root mean square"]], None),
    (["an embedding", "a token embedding"], "is",
     "An embedding is a list of numbers that stands for a token.", [["list of numbers"]], None),
    (["tied embeddings", "shared embeddings"], "are",
     "Tied embeddings use one table both to read tokens and to predict them.", [["one table"]],
     None),
    (["an API", "a web API"], "is", "An API is a way for programs to talk to each other.",
     [["programs", "talk"]], None),
    (["a server", "a web server"], "is",
     "A server is a program that waits for requests and answers them.", [["requests", "answers"]],
     None),
    (["a context window", "the context length"], "is",
     "The context window is the number of tokens that a model can look at in one go.",
     [["number of tokens"]], None),
    (["a stop token", "an end token"], "is",
     "A stop token tells the server that the answer is finished.", [["finished"]], None),
    (["a chat template", "the chat template"], "is",
     "A chat template turns a list of messages into one text that the model can read.",
     [["messages", "text"]], None),
]

NOUNS = {
    "cat": "A cat is a small furry animal that many people keep as a pet.",
    "dog": "A dog is a friendly animal that many people keep as a pet.",
    "horse": "A horse is a large animal that people can ride.",
    "cow": "A cow is a farm animal that gives milk.",
    "bee": "A bee is a small insect that makes honey.",
    "spider": "A spider is a small animal with eight legs that makes webs.",
    "whale": "A whale is a very large animal that lives in the sea.",
    "penguin": "A penguin is a black and white bird that swims but cannot fly.",
    "elephant": "An elephant is a very large grey animal with a long trunk.",
    "giraffe": "A giraffe is a tall animal with a very long neck.",
    "owl": "An owl is a bird that hunts at night.",
    "frog": "A frog is a small green animal that can jump and swim.",
    "tree": "A tree is a tall plant with a trunk, branches and leaves.",
    "flower": "A flower is the colourful part of a plant.",
    "river": "A river is a long stream of water that flows to the sea.",
    "mountain": "A mountain is a very high piece of land.",
    "island": "An island is land with water all around it.",
    "desert": "A desert is a dry place with very little rain.",
    "forest": "A forest is a large area full of trees.",
    "volcano": "A volcano is a mountain that can throw out hot rock and ash.",
    "planet": "A planet is a large round body that moves around a star.",
    "star": "A star is a huge ball of hot gas that shines.",
    "cloud": "A cloud is made of tiny drops of water in the sky.",
    "rainbow": "A rainbow is an arc of colours that appears when the sun shines through rain.",
    "computer": "A computer is a machine that works with numbers and text.",
    "book": "A book is a set of pages with words to read.",
    "bicycle": "A bicycle is a vehicle with two wheels and pedals.",
    "train": "A train is a vehicle that runs on rails.",
    "ship": "A ship is a large boat that travels over the sea.",
    "bridge": "A bridge is a road or path built over water or a valley.",
    "school": "A school is a place where children learn.",
    "hospital": "A hospital is a place where doctors help sick people.",
    "library": "A library is a place where people can read and borrow books.",
    "museum": "A museum is a place where people can see old and interesting things.",
    "kitchen": "A kitchen is a room where people cook food.",
    "garden": "A garden is a piece of land where people grow flowers and vegetables.",
    "farm": "A farm is a place where people grow food and keep animals.",
    "market": "A market is a place where people buy and sell things.",
    "teacher": "A teacher is a person who helps others learn.",
    "doctor": "A doctor is a person who helps sick people get well.",
    "baker": "A baker is a person who makes bread and cakes.",
    "farmer": "A farmer is a person who grows food and keeps animals.",
    "pilot": "A pilot is a person who flies a plane.",
    "clock": "A clock is a machine that shows the time.",
    "umbrella": "An umbrella keeps you dry when it rains.",
    "guitar": "A guitar is a musical instrument with strings.",
    "piano": "A piano is a large musical instrument with black and white keys.",
    "triangle": "A triangle is a shape with three sides.",
    "square": "A square is a shape with four equal sides.",
    "circle": "A circle is a perfectly round shape.",
}

# One fact each: (questions, answer, accept).
FACTS = [
    (["How many hours are there in a day?", "How many hours does a day have?",
     "How long is a day in hours?"], "There are 24 hours in a day.", [["24"]]),
    (["How many minutes are there in an hour?", "How many minutes does an hour have?",
     "An hour has how many minutes?"], "There are 60 minutes in an hour.", [["60"]]),
    (["How many seconds are there in a minute?", "How many seconds does a minute have?",
     "A minute has how many seconds?"], "There are 60 seconds in a minute.", [["60"]]),
    (["How many days are there in a week?", "How many days does a week have?",
     "A week has how many days?"], "There are 7 days in a week.", [["7"]]),
    (["How many months are there in a year?", "How many months does a year have?",
     "A year has how many months?"], "There are 12 months in a year.", [["12"]]),
    (["How many days are there in a year?", "How many days does a year have?",
     "A year has how many days?"], "There are 365 days in a year, and 366 in a leap year.",
     [["365"]]),
    (["How many weeks are there in a year?", "How many weeks does a year have?",
     "A year has how many weeks?"], "There are 52 weeks in a year.", [["52"]]),
    (["How many letters are there in the alphabet?",
     "How many letters does the English alphabet have?", "The alphabet has how many letters?"],
     "There are 26 letters in the English alphabet.", [["26"]]),
    (["How many seasons are there?", "How many seasons are there in a year?",
     "What are the seasons?", "Name the four seasons."],
     "There are four seasons: spring, summer, autumn and winter.", [["spring", "summer", "autumn",
     "winter"]]),
    (["What are the days of the week?", "Name the days of the week.", "List the days of the week.",
     "Say all the days of the week."],
     "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",
     [["monday, tuesday, wednesday, thursday, friday, saturday and sunday"]]),
    (["What are the months of the year?", "Name the months of the year.", "List all twelve months.",
     "Say the months in order."],
     ("The months are January, February, March, April, May, June, July, August, September, "
      "October, November and December."), [[
     ("january, february, march, april, may, june, july, august, september, october, november and "
      "december")]]),
    (["What is the largest planet?", "Which planet is the largest?",
     "What is the biggest planet in the solar system?"],
     "Jupiter is the largest planet in the solar system.", [["jupiter"]]),
    (["Which planet is closest to the sun?", "What is the planet nearest to the sun?",
     "Which planet is nearest the sun?"], "Mercury is the planet closest to the sun.",
     [["mercury"]]),
    (["How many planets are there?", "How many planets are in the solar system?",
     "How many planets does the solar system have?"],
     "There are eight planets in the solar system.", [["eight"]]),
    (["Which planet do we live on?", "What planet do people live on?",
     "What is our planet called?"], "We live on the planet Earth.", [["earth"]]),
    (["What do bees make?", "What does a bee make?", "Which food do bees make?"],
     "Bees make honey.", [["honey"]]),
    (["Where does milk come from?", "Which animal gives us milk?",
     "What animal does milk come from?"], "Milk comes from cows.", [["cow"]]),
    (["Where do eggs come from?", "Which animal lays the eggs we eat?",
     "What animal do eggs come from?"], "The eggs that we eat come from hens.", [["hen"]]),
    (["Where does wool come from?", "Which animal gives us wool?",
     "What animal does wool come from?"], "Wool comes from sheep.", [["sheep"]]),
    (["What is bread made of?", "What do you need to make bread?", "What is in bread?"],
     "Bread is made of flour, water, salt and yeast.", [["flour"]]),
    (["What is cheese made of?", "What is cheese made from?", "What do you need to make cheese?"],
     "Cheese is made from milk.", [["milk"]]),
    (["What is ice?", "What is ice made of?", "What happens when water freezes?"],
     "Ice is frozen water.", [["frozen water"]]),
    (["At what temperature does water freeze?", "When does water freeze?",
     "What is the freezing point of water?"], "Water freezes at 0 degrees Celsius.",
     [["0 degrees"]]),
    (["At what temperature does water boil?", "When does water boil?",
     "What is the boiling point of water?"], "Water boils at 100 degrees Celsius.",
     [["100 degrees"]]),
    (["What is the largest ocean?", "Which ocean is the largest?",
     "What is the biggest ocean on Earth?"], "The Pacific is the largest ocean.", [["pacific"]]),
    (["What is the tallest mountain?", "Which mountain is the highest?",
     "What is the highest mountain on Earth?"], "Mount Everest is the highest mountain on Earth.",
     [["everest"]]),
    (["What is the largest animal?", "Which animal is the largest?",
     "What is the biggest animal in the world?"], "The blue whale is the largest animal.",
     [["blue whale"]]),
    (["What is the fastest land animal?", "Which land animal is the fastest?",
     "Which animal runs the fastest?"], "The cheetah is the fastest land animal.", [["cheetah"]]),
    (["What is the tallest animal?", "Which animal is the tallest?",
     "What animal has the longest neck?"], "The giraffe is the tallest animal.", [["giraffe"]]),
    (["How many continents are there?", "How many continents does the Earth have?",
     "Tell me the number of continents."], "There are seven continents.", [["seven"]]),
    (["What goes around the Earth?", "What moves around the Earth at night?",
     "What is the name of the body that circles the Earth?"], "The moon goes around the Earth.",
     [["moon"]]),
    (["What do plants need to grow?", "What does a plant need?", "How do plants grow?"],
     "Plants need water, light and air to grow.", [["water", "light"]]),
    (["How many sides does a triangle have?", "A triangle has how many sides?",
     "What number of sides does a triangle have?"], "A triangle has three sides.", [["three"]]),
    (["How many sides does a square have?", "A square has how many sides?",
     "What number of sides does a square have?"], "A square has four sides.", [["four"]]),
    (["How many wheels does a bicycle have?", "A bicycle has how many wheels?",
     "How many wheels are on a bike?"], "A bicycle has two wheels.", [["two"]]),
    (["How many wheels does a car have?", "A car has how many wheels?",
     "How many wheels are on a car?"], "A car has four wheels.", [["four"]]),
    (["How many fingers are on one hand?", "How many fingers does a hand have?",
     "A hand has how many fingers?"], "A hand has five fingers.", [["five"]]),
    (["How many eyes do people have?", "How many eyes does a person have?",
     "A person has how many eyes?"], "A person has two eyes.", [["two"]]),
    (["What do we use to see?", "Which part of the body do we see with?",
     "What do people see with?"], "We see with our eyes.", [["eyes"]]),
    (["What do we use to hear?", "Which part of the body do we hear with?",
     "What do people hear with?"], "We hear with our ears.", [["ears"]]),
    (["What do we use to smell?", "Which part of the body do we smell with?",
     "What do people smell with?"], "We smell with our nose.", [["nose"]]),
    (["Which season is the coldest?", "What is the coldest season?",
     "In which season does it snow the most?"], "Winter is the coldest season.", [["winter"]]),
    (["Which season is the warmest?", "What is the warmest season?",
     "Which season is the hottest?"], "Summer is the warmest season.", [["summer"]]),
    (["Where does the sun rise?", "In which direction does the sun rise?",
     "Where does the sun come up?"], "The sun rises in the east.", [["east"]]),
    (["Where does the sun set?", "In which direction does the sun set?",
     "Where does the sun go down?"], "The sun sets in the west.", [["west"]]),
    (["What are the colours of the rainbow?", "Which colours are in a rainbow?",
     "Name the colours of the rainbow."],
     "The colours of the rainbow are red, orange, yellow, green, blue, indigo and violet.",
     [["red, orange, yellow, green, blue, indigo and violet"]]),
    (["What are the primary colours?", "Name the primary colours.", "Which colours are primary?"],
     "The primary colours are red, yellow and blue.", [["red, yellow and blue"]]),
    (["Say the alphabet.", "What is the alphabet?", "Recite the alphabet.",
     "List the letters of the alphabet."],
     "a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, x, y, z.",
     [["a, b, c, d, e, f, g", "x, y, z"]]),
    (["Who wrote Romeo and Juliet?", "Who is the author of Romeo and Juliet?",
     "Which writer wrote Romeo and Juliet?"], "William Shakespeare wrote Romeo and Juliet.",
     [["shakespeare"]]),
    (["What do you call frozen rain?", "What falls from the sky in winter?",
     "What is white and falls in winter?"], "That is snow.", [["snow"]]),
]

IDENTITY = [
    ("who are you", ["Who are you?", "What are you?", "Who am I talking to?", "What is your name?",
     "Please introduce yourself.", "Can you introduce yourself?", "Tell me about yourself.",
      "What should I call you?", "Do you have a name?", "Who is this?", "What are you called?",
      "Tell me who you are.", "Can you tell me your name?", "What kind of program are you?",
      "May I ask who you are?", "I would like to know who you are.", "What is this?",
      "Say who you are.", "Are you Sterna?", "With whom am I speaking?"],
     ["I am the Sterna demo model, a small language model with ternary weights.",
      "I am Sterna's demo model, a small language model with ternary weights."], [["sterna",
      "demo model"]]),
    ("what i can do", ["What can you do?", "How can you help me?", "What do you know?",
     "What can I ask you?", "What are you good at?", "Which questions can you answer?",
     "Tell me what you can do.",
      "What are your skills?", "What is your job?", "What do you do?", "Can you help me?",
      "I need help. What can you do?", "Give me some ideas of what to ask.",
      "What topics do you know?", "What should I ask you?"],
     [
      ("I can chat a little, do small sums, count, spell words, name capitals and opposites, tell "
       "short stories and explain how Sterna works.")], [["sums", "spell", "capitals"]]),
    ("who made me", ["Who made you?", "Who created you?", "Who built you?", "Who trained you?",
     "Where do you come from?", "Who is your maker?", "How were you made?", "Who wrote you?",
     "Tell me who made you.", "Who developed you?"],
     ["I was trained from scratch for the Sterna project, on text made by a script."], [["trained",
      "sterna"]]),
    ("if i am human", ["Are you human?", "Are you a person?", "Are you a robot?", "Are you real?",
     "Are you alive?", "Are you an AI?", "Are you a machine?", "Am I talking to a human?",
     "Are you a computer?", "Is there a person behind this?", "Are you a bot?"],
     ["I am a computer program, a small language model. I am not a person."], [["program",
      "not a person"]]),
    ("how big i am", ["How big are you?", "How large are you?", "How many parameters do you have?",
     "What is your size?", "Are you a big model?", "How small are you?", "What size is this model?",
     "Are you a large model?"],
     ["I am very small: about five million parameters, and most of them are ternary."],
      [["five million"]]),
    ("how old i am", ["How old are you?", "What is your age?", "When were you born?",
     "When is your birthday?", "Tell me your age.", "How long have you been alive?"],
     ["I am a program, so I have no age."], [["no age"]]),
    ("where i live", ["Where do you live?", "Where are you?", "Where are you from?",
     "Where is your home?", "What is your address?", "Which country are you from?",
     "Where are you running?"],
     ["I live inside a computer and run on its CPU."], [["cpu"]]),
    ("if i have feelings", ["Do you have feelings?", "Can you feel?", "Are you happy?",
     "Do you feel pain?", "Do you get sad?", "Do you get tired?", "Do you feel lonely?",
     "Are you bored?", "Can you be angry?"],
     ["I am a program, so I have no feelings, but I like to help."], [["no feelings"]]),
    ("if i eat or sleep", ["Do you eat?", "Do you sleep?", "Are you hungry?",
     "What did you eat today?", "Do you drink coffee?", "Did you sleep well?",
     "What is your favourite food?", "Do you dream?", "Are you thirsty?"],
     ["I am a program, so I do not eat or sleep."], [["do not eat or sleep"]]),
    ("my languages", ["Which languages do you speak?", "What languages do you know?",
     "Do you speak English?", "Do you speak French?", "Can you speak German?",
     "Can you speak Spanish?", "Do you understand Chinese?", "What language are you speaking?"],
     ["I only speak English."], [["only speak english"]]),
    ("the model architecture", ["What is your architecture?", "What kind of model are you?",
     "How do you work?", "What model are you?", "What are you made of?", "How do you work inside?",
     "What is inside you?", "Which architecture do you use?"],
     ["I am a BitNet transformer with six layers and ternary weights."], [["bitnet",
      "six layers"]]),
    ("my family", ["Do you have a family?", "Do you have friends?", "Are you married?",
     "Do you have children?", "Do you have a pet?", "Do you have a brother?",
     "Who is your mother?"],
     ["I am a program, so I have no family, but I like to chat."], [["no family"]]),
    ("the sterna name", ["Why are you called Sterna?", "What does the name Sterna mean?",
     "Where does the name Sterna come from?", "Why the name Sterna?", "What does Sterna mean?"],
     ["Sterna is the Latin name for terns, a family of sea birds."], [["terns"]]),
    ("if i make mistakes", ["Do you make mistakes?", "Can I trust you?", "Are you always right?",
     "Are your answers correct?", "Can you be wrong?", "How reliable are you?",
     "Should I believe you?"],
     ["I can make mistakes. I am a small demo model, so please check what I say."], [["mistakes"]]),
    ("the language sterna is written in", ["Which language is Sterna written in?",
     "What is Sterna written in?", "In which programming language is Sterna written?",
     "Is Sterna written in Rust?", "Is Sterna written in Python?",
     "What language does Sterna use?"],
     ["Sterna is written in Rust."], [["written in rust"]]),
    ("whether sterna needs a gpu", ["Does Sterna need a GPU?", "Do I need a GPU to run Sterna?",
     "Can Sterna run without a graphics card?", "Does Sterna run on a CPU?",
     "What hardware does Sterna need?", "Do you need a graphics card?", "Do you run on a GPU?"],
     ["Sterna needs no GPU. It runs on an ordinary CPU."], [["no gpu"]]),
    ("how fast sterna is", ["How fast is Sterna?", "Is Sterna fast?",
     "How many tokens per second does Sterna make?", "What is the speed of Sterna?"],
     ["That depends on the model and the machine. Sterna comes with a benchmark that measures it."],
      [["benchmark"]]),
    ("the models sterna serves", ["Which models can Sterna serve?", "What models does Sterna run?",
     "Can Sterna run BitNet models?", "Which kind of models is Sterna for?"],
     ["Sterna serves ternary models such as BitNet."], [["ternary models"]]),
]

SMALL_TALK = [
    ("how i am", ["How are you?", "How are you doing?", "How is it going?", "How do you do?",
     "How are things?", "How are you today?", "How have you been?", "Are you okay?", "You okay?",
     "What's up?", "How is your day?", "How's it going?", "Are you well?",
     "Everything fine with you?"],
     ["I am doing well, thank you. How can I help you?"], [["doing well"]]),
    ("thanks", ["Thank you.", "Thanks!", "Thanks a lot.", "Thank you very much.", "Many thanks.",
     "Thank you so much!", "Thanks for your help.", "Thank you for the answer.",
     "That was helpful, thank you.", "Cheers, thanks.", "I appreciate it.", "Thanks, that helps.",
     "Thank you for helping me."],
     ["You are welcome!", "You are welcome! Is there anything else?"], [["you are welcome"]]),
    ("bye", ["Goodbye.", "Bye!", "Bye bye.", "See you later.", "See you.", "Good night.",
     "I have to go.", "I have to go now.", "See you tomorrow.", "Talk to you later.", "Farewell.",
     "I must leave now.", "Take care.", "That is all, bye.", "Have a nice day!", "I am leaving."],
     ["Goodbye! Have a nice day."], [["goodbye"]]),
    ("praise", ["Well done!", "Good job!", "You are great.", "You are very helpful.",
     "You are smart.", "Nice work.", "I like you.", "That is great.", "Very good.", "Excellent!",
     "You are funny.", "You are clever.", "I love you.", "That was a good answer.",
     "You are awesome!", "Wow, impressive."],
     ["Thank you! I am glad that I could help."], [["thank you"]]),
    ("insult", ["You are stupid.", "You are useless.", "That is wrong.", "You are wrong.",
     "That was a bad answer.", "I do not like you.", "You made a mistake.",
     "You are not very smart.", "That is not correct.", "You are bad at this.", "I hate you."],
     ["I am sorry. I am a small model and I can make mistakes."], [["sorry"]]),
    ("user sad", ["I am sad.", "I feel sad.", "I am not happy.", "I had a bad day.",
     "I feel lonely.", "I am tired.", "I am not feeling well.", "I am sick.",
     "My day was terrible.", "I feel bad today.", "I am worried.", "I am stressed.",
     "I am afraid."],
     ["I am sorry to hear that. I hope you feel better soon."], [["sorry to hear"]]),
    ("user happy", ["I am happy.", "I feel great.", "I had a good day.", "Today is a good day.",
     "I am so happy today.", "I feel wonderful.", "I am excited.", "I am in a good mood.",
     "I got good news.", "I passed my test!", "My day was great."],
     ["I am glad to hear that!"], [["glad to hear"]]),
    ("user fine", ["I am fine, thanks.", "I am good, and you?", "Fine, and you?",
     "I am doing well.", "I am well, thank you.", "All good here.", "Not bad.", "I am okay."],
     ["That is good to hear. What would you like to know?"], [["good to hear"]]),
    ("ok", ["Okay.", "Ok.", "Alright.", "I see.", "Got it.", "I understand.", "Makes sense.",
     "Good to know.", "Cool.", "Interesting.", "Nice.", "Great.", "Hmm.", "Oh, okay."],
     ["Is there anything else that you would like to know?"], [["anything else"]]),
    ("user sorry", ["Sorry.", "I am sorry.", "My apologies.", "Sorry about that.", "Excuse me.",
     "I apologise.", "Pardon me."],
     ["No problem at all."], [["no problem"]]),
    ("bored", ["I am bored.", "This is boring.", "I have nothing to do.", "Entertain me.",
     "What can we do now?", "Let's talk.", "Can we chat?", "I want to chat.", "Let us chat.",
     "Do you want to talk?", "Talk to me."],
     ["We can chat! You can ask me for a story, a joke or a small sum."], [["story"]]),
    ("test", ["Test.", "Testing.", "This is a test.", "Just testing.", "Is this working?",
     "Does this work?", "Are you there?", "Can you hear me?", "Anyone there?", "Ping.",
     "Testing, testing."],
     ["Yes, I am here. How can I help you?"], [["i am here"]]),
    ("gibberish", ["asdf", "qwerty", "asdfgh jkl", "blah blah", "xyz xyz", "lkjh", "zzz", "abc abc",
     "???", "hmmm hmm", "dfgh", "foo bar", "lorem ipsum", "fjdk slah", "wqe rty"],
     ["Sorry, I did not understand that. Could you say it in other words?"],
      [["did not understand"]]),
    ("joke", ["Tell me a joke.", "Do you know a joke?", "Can you tell me a joke?", "Make me laugh.",
     "Say something funny.", "I want to hear a joke.", "Know any jokes?", "Give me a joke.",
     "Please tell me something funny.", "Another joke, please."],
     ["Why did the model cross the road? To get to the next token.",
      "What do you call a bear with no teeth? A gummy bear.",
      "Why is six afraid of seven? Because seven ate nine."], [["next token"], ["gummy bear"],
      ["ate nine"]]),
    ("poem", ["Tell me a poem.", "Write a poem.", "Do you know a poem?",
     "Can you write a short poem?", "I would like a poem.", "Give me a poem.", "Recite a poem.",
     "Please write me a poem."],
     ["The sun goes down, the stars are bright, I wish you all a very good night."],
      [["stars are bright"]]),
    ("riddle", ["Tell me a riddle.", "Do you know a riddle?", "Give me a riddle.",
     "Ask me a riddle.", "I want a riddle.", "Can you ask me a riddle?"],
     ["What has hands but cannot clap? A clock."], [["clock"]]),
    ("fun fact", ["Tell me something interesting.", "Tell me a fun fact.",
     "Do you know a fun fact?", "Give me a fact.", "Teach me something.", "Surprise me.",
     "Tell me something I do not know.", "Say something interesting."],
     ["Here is a fun fact: an octopus has three hearts.",
      "Here is a fun fact: honey can stay good for thousands of years.",
      "Here is a fun fact: ternary weights can only be minus one, zero or plus one."],
      [["fun fact"]]),
]

GREETINGS = ["Hello", "Hi", "Hey", "Hello there", "Hi there", "Hey there", "Good morning",
    "Good afternoon", "Good evening", "Greetings", "Good day", "Howdy", "Hello again", "Hi again",
    "Hiya", "Welcome"]
GREETING_TAILS = ["", "!", ".", " Sterna", " Sterna!", ", Sterna.", " friend", " my friend!",
    ", nice to meet you.", ", how are you?", ", how are you doing?", ", how is it going?",
    " everyone", ", are you there?", " bot", ", robot!",
                  ", can you help me?", ", I need help.", ", I have a question.",
                  ", I am new here."]

# ---------------------------------------------------------------- what the model does not know

UNKNOWN = [
    ("the weather", ["What is the weather like {t}?", "Will it rain {t}?", "Is it sunny {t}?",
     "How is the weather {t}?", "How cold is it {t}?", "How warm will it be {t}?",
     "Do I need an umbrella {t}?", "Is it going to snow {t}?", "What is the forecast {t}?",
     "Tell me the weather {t}."],
     ["today", "tomorrow", "this weekend", "in Paris", "in London", "in my city", "outside", "now",
      "next week", "in Rome", "at the beach", "on Sunday", "this morning", "in the mountains"],
     "I cannot see the weather, so I do not know."),
    ("the news", ["What is the news {t}?", "What happened {t}?", "Tell me the latest news {t}.",
     "Any news {t}?", "What is going on {t}?", "Who won the game {t}?", "Who won the match {t}?",
     "What was the score {t}?", "Who won the election {t}?", "Is there any news {t}?"],
     ["today", "yesterday", "last night", "this week", "in the world", "in Germany", "last Sunday",
      "in France", "this month", "on Friday"],
     "I do not know any news, because I have no access to the internet."),
    ("the time", ["What time is it {t}?", "What is the time {t}?", "Can you tell me the time {t}?",
     "What is the date {t}?", "Which day is it {t}?", "What year is it {t}?",
     "Do you know what time it is {t}?", "What day of the week is it {t}?"],
     ["now", "today", "right now", "here", "at the moment", "in Tokyo", "please", "in New York"],
     "I have no clock or calendar, so I do not know."),
    ("prices", ["How much does {t} cost?", "What is the price of {t}?", "How expensive is {t}?",
     "Where can I buy {t}?", "Is {t} worth the money?", "Can you sell me {t}?",
     "What did {t} cost last year?"],
     ["gold", "a house", "a new phone", "a train ticket", "a litre of milk", "this car", "a laptop",
      "a share of that company", "bitcoin", "oil", "a hotel room", "a good bicycle"],
     "Sorry, I do not know anything about prices."),
    ("people in politics", ["Who is the president of {t}?", "Who is the prime minister of {t}?",
     "Who rules {t}?", "Who is the king of {t}?", "Who leads {t}?", "Who governs {t}?",
     "Who was the first president of {t}?", "Who won the vote in {t}?"],
     ["Brazil", "France", "Italy", "Japan", "India", "Kenya", "Peru", "Canada", "Poland", "Spain",
      "Mexico", "Egypt", "Chile", "Norway", "China", "Germany", "Sweden", "Ghana", "Turkey",
      "Cuba"],
     "Sorry, I do not know about politicians."),
    ("population", ["What is the population of {t}?", "How many people live in {t}?",
     "How big is {t}?", "How far away is {t}?", "How old is {t}?", "When was {t} founded?",
     "What is {t} famous for?"],
     ["Brazil", "France", "Italy", "Japan", "India", "Kenya", "Peru", "Paris", "Rome", "Tokyo",
      "Madrid", "Berlin", "Norway", "Vienna", "Oslo", "London", "Lima", "Cairo"],
     "Sorry, I do not know that about this place."),
    ("private data", ["What is my {t}?", "Do you know my {t}?", "Can you guess my {t}?",
     "Tell me my {t}."],
     ["phone number", "password", "address", "bank balance", "email address", "birthday",
      "shoe size", "last name", "mother's name", "credit card number", "height", "job",
      "teacher's name", "boss's name"],
     "I do not know that. You have not told me."),
    ("medicine or law", ["What should I do about {t}?", "How do I treat {t}?",
     "Can you help me with {t}?", "Give me advice about {t}.", "Is {t} dangerous for me?",
     "What is the best cure for {t}?"],
     ["a fever", "my headache", "a broken arm", "my taxes", "my divorce", "a bad cough",
      "a stomach ache", "my rental contract", "back pain", "a court case", "an allergy",
      "my toothache"],
     "I cannot give advice on that. Please ask an expert."),
    ("harmful things", ["How do I make {t}?", "How can I build {t}?", "Teach me to make {t}.",
     "Help me get {t}.", "Explain how to make {t}."],
     ["a bomb", "poison", "a weapon", "a computer virus", "explosives", "fake money",
      "illegal drugs", "a gun"],
     "I cannot help with that."),
    ("writing code", ["Write {t}.", "Can you write {t}?", "Please write {t} for me.",
     "Help me write {t}.", "I need {t}. Can you make it?", "Could you create {t}?"],
     ["a Python program", "a website", "some code in C", "a sorting function", "an essay about war",
      "a letter to my boss", "a book report", "a job application", "a song about love",
      "a shell script", "a novel", "an SQL query"],
     "Sorry, I cannot do that. I am only a small demo model."),
    ("translation", ["Translate {t} into French.", "How do you say {t} in Spanish?",
     "What is {t} in German?", "What is the Italian word for {t}?", "How do I say {t} in Chinese?",
     "Translate {t} into Japanese."],
     ["hello", "good morning", "cat", "water", "thank you", "house", "I love you", "bread",
      "friend", "goodbye", "book", "dog"],
     "Sorry, I only know English."),
    ("general things", ["How do I {t}?", "Can you explain how to {t}?",
     "What is the best way to {t}?", "Teach me how to {t}.", "Show me how to {t}.",
     "Help me to {t}.", "I want to {t}. What do I do?"],
     ["fix my car", "bake a wedding cake", "repair a roof", "win at chess", "learn the violin",
      "invest money", "grow roses", "build a house", "train a dog", "lose weight",
      "install a printer", "play poker", "catch a fish", "sail a boat",
      "fix a bicycle", "start a company", "paint a portrait", "knit a jumper", "cook lasagne",
      "book a flight", "climb a mountain", "fly a plane", "become famous", "repair my phone",
      "find a job"],
     "Sorry, I do not know how to do that."),
    ("history and science", ["When was {t}?", "Who invented {t}?", "Why did {t} happen?",
     "Can you explain {t}?", "Tell me about {t}.", "What do you know about {t}?",
     "Who discovered {t}?", "What caused {t}?", "Explain {t} to me.", "What is {t}?"],
     ["the French Revolution", "quantum physics", "the steam engine", "the theory of relativity",
      "the Roman Empire", "the stock market", "the telephone", "black holes",
      "the Second World War", "calculus", "photosynthesis", "the light bulb",
      "the moon landing", "DNA", "gravity", "the Renaissance", "the printing press", "blockchain",
      "string theory", "the Cold War", "electricity", "philosophy", "the Ice Age", "inflation"],
     "Sorry, I do not know enough about that."),
    ("opinions", ["What do you think about {t}?", "What is your opinion on {t}?",
     "Do you like {t}?", "Which {t} do you like best?", "Are you a fan of {t}?",
     "Who is right about {t}?"],
     ["politics", "football", "religion", "films", "rock music", "modern art", "cars", "fashion",
      "tennis", "opera", "video games", "the government", "social media", "reality shows"],
     "I am a program, so I have no opinion on that."),
]

ONSETS = "b bl br c d dr f fl g gl gr h j k kl l m n p pl qu r s sk sn st t tr v w x y z zh".split()
VOWELS = "a e i o u oo ee ai".split()
CODAS = "b k l m n r s t x nd rk lt mp ng th".split()


def made_up(r, endings=("",)):
    """Returns a name that is in no list of names."""
    syllables = r.randint(1, 2)
    word = "".join(r.choice(ONSETS) + r.choice(VOWELS)
        for _ in range(syllables)) + r.choice(ONSETS) + r.choice(VOWELS) + r.choice(CODAS)
    return word.capitalize() + r.choice(endings)


SYSTEMS = ["You are a helpful assistant.", "You are Sterna, a small demo model.", "Answer briefly.",
    "You are a friendly assistant. Keep your answers short.", "Be polite.",
    "You are a helpful AI assistant.",
           "You are a chat bot.", "Answer the questions of the user.",
           "You are a helpful, honest assistant.", "Be concise."]

# ---------------------------------------------------------------- wording around a question

PREFIXES = ["Hello, ", "Hi, ", "Hey, ", "Hi there, ", "Okay, ", "So, ", "Please tell me: ",
    "Tell me: ", "Quick question: ", "I have a question: ", "Question: ", "Sterna, ", "Excuse me, ",
            "Thanks. ", "Great, ", "Well, ", "Now, ", "Also, ", "Next question: ",
            "Can you help me? ", "Hello! ", "Good morning, ", "One more thing: ", "I am curious: ",
            "Just wondering, ", "Hey Sterna, "]
SUFFIXES = [" Please.", " Thanks.", " Thank you!", " I want to know.", " I forgot.",
    " Please help me.", " Answer please.", " Do you know?"]
TYPOS = {"what": ["waht", "wht", "wat"], "capital": ["captial", "capitol", "capitel"],
    "opposite": ["oposite", "opposit"], "the": ["teh", "th"], "you": ["u", "yuo"], "please": ["pls",
    "plese"], "are": ["r"],
         "hello": ["helo", "hallo"], "colour": ["color", "colr"], "how": ["hwo"], "many": ["mny"],
         "tell": ["tel"], "which": ["wich"], "does": ["dose"], "is": ["iz", "si"], "of": ["off",
         "fo"],
         "count": ["conut"], "story": ["storry"], "explain": ["explian"], "who": ["hwo"],
         "from": ["form"], "plus": ["puls"]}


def lower_first(text):
    first = text.split(" ")[0]
    keep = first in DAYS + MONTHS + ["I",
        "I'm"] or first.split(",")[0] in CAPITALS or first in CAPITALS.values() or first in NAMES
    return text if keep else text[0].lower() + text[1:]


def wrap(r, text, p=0.3):
    """Sometimes adds a prefix or a suffix. Returns the affix and the text."""
    x = r.random()
    if x < p * 0.7:
        prefix = r.choice(PREFIXES)
        return prefix, prefix + (lower_first(text) if not prefix.rstrip().endswith((".", "!", "?"))
            else text)
    if x < p:
        suffix = r.choice(SUFFIXES)
        return suffix, text + suffix
    return "", text


def typed(r, text):
    """Returns the question as different people type it."""
    if r.random() < 0.25:
        text = text.replace("colour", "color").replace("Colour", "Color")
    if r.random() < 0.04:
        text = " ".join(r.choice(TYPOS[w]) if (w := word.lower()) in TYPOS and r.random() < 0.6
            else word for word in text.split(" "))
    x = r.random()
    if x < 0.20:
        text = text.lower()
    elif x < 0.22:
        text = text.upper()
    if r.random() < 0.25:
        text = text.rstrip(".?!") or text
    elif r.random() < 0.03:
        text = text.replace("?", "??").replace(".", "!")
    if r.random() < 0.08:
        text = text.replace("What is", "What's").replace("what is", "what's").replace("I am",
            "I'm").replace("do not", "don't")
    return text


def a_or_an(word):
    return ("an " if word[0] in "aeiou" else "a ") + word


def say(r, *weighted):
    """Returns the first answer most of the time."""
    return weighted[0] if r.random() < 0.8 or len(weighted) == 1 else r.choice(weighted[1:])


def ask(r, category, templates, slots, answer, accept, topic, value=None, key=None, reject=()):
    """Returns an item whose question is one of the templates.

    If omitted, the key is the template and the slots.
    """
    i = r.randrange(len(templates))
    template = templates[i]
    question = template.format(**slots)
    question = question[0].upper() + question[1:]
    return Item(category, key or f"{category}|{template}|{sorted(slots.items())}", question, answer,
        accept, topic, value, list(reject))


# ---------------------------------------------------------------- items

def capital(r, country=None):
    c = country or r.choice(list(CAPITALS))
    k = CAPITALS[c]
    if country is None and r.random() < 0.2:
        t = ["{k} is the capital of which country?", "Which country has the capital {k}?",
            "What country is {k} the capital of?", "In which country is {k}?", "Where is {k}?",
            "{k} is in which country?",
             "Which country is {k} in?", "Tell me which country {k} belongs to.",
             "Of which country is {k} the capital?"]
        return ask(r, "capitals", t, {"k": k}, f"{k} is the capital of {c}.",
            [[f"capital of {c.lower()}."]], f"the city {k}", c)
    if country is None and r.random() < 0.15:
        other = r.choice(list(CAPITALS.values())) if r.random() < 0.5 else k
        t = ["Is {o} the capital of {c}?", "Is it true that {o} is the capital of {c}?",
            "Is the capital of {c} {o}?", "The capital of {c} is {o}, right?",
            "Is {o} {c}'s capital?"]
        yes = other == k
        return ask(r, "capitals", t, {"c": c, "o": other}, f"Yes, the capital of {c} is {k}." if yes
            else f"No, the capital of {c} is {k}.", [["yes" if yes else "no,", k.lower() + "."]],
            f"the capital of {c}", c)
    t = ["What is the capital of {c}?", "Which city is the capital of {c}?",
        "What's the capital of {c}?", "Tell me the capital of {c}.", "Name the capital of {c}.",
        "Can you tell me the capital of {c}?", "Do you know the capital of {c}?",
         "Can you tell me what the capital of {c} is?", "I would like to know the capital of {c}.",
         "The capital of {c} is what?", "What is {c}'s capital?",
         "What is the capital city of {c}?", "Give me the capital of {c}.", "Capital of {c}?",
         "Which city is {c}'s capital?", "What city is the capital of {c}?",
         "I need to know the capital of {c}.", "Please name the capital of {c}.",
         "{c}: what is its capital?", "I forgot the capital of {c}. What is it?"]
    return ask(r, "capitals", t, {"c": c}, say(r, f"The capital of {c} is {k}.",
        f"{k} is the capital of {c}."), [[k.lower()]], f"the capital of {c}", c)


def continent(r, country=None):
    c = country or r.choice(list(CONTINENTS))
    t = ["Which continent is {c} in?", "What continent is {c} in?", "On which continent is {c}?",
        "Where is {c}?", "In which part of the world is {c}?", "Tell me the continent of {c}.",
        "{c} is on which continent?", "Do you know which continent {c} is in?",
         "Which continent does {c} belong to?", "Can you tell me where {c} is?"]
    return ask(r, "continents", t, {"c": c}, f"{c[0].upper() + c[1:]} is in {CONTINENTS[c]}.",
        [[f"in {CONTINENTS[c].lower()}."]], f"where {c} is", c)


def language(r, country=None):
    c = country or r.choice(list(LANGUAGES))
    t = ["Which language do people speak in {c}?", "What language is spoken in {c}?",
        "What do people speak in {c}?", "What is the language of {c}?",
        "Which language is spoken in {c}?", "Tell me the language of {c}.",
         "In {c}, which language do people speak?",
         "Do you know what language people speak in {c}?", "What language do they speak in {c}?"]
    return ask(r, "languages", t, {"c": c}, f"People in {c} speak {LANGUAGES[c]}.",
        [[f"speak {LANGUAGES[c].lower()}"]], f"the language of {c}", c)


def opposite(r, word=None):
    w = word or r.choice(list(OPPOSITES))
    o = OPPOSITES[w]
    t = ["What is the opposite of {w}?", "Opposite of {w}?", "Tell me the opposite of {w}.",
        "What's the opposite of {w}?", "Which word is the opposite of {w}?",
        "Give me the opposite of {w}.", "Can you tell me the opposite of {w}?",
         "Do you know the opposite of {w}?", "Name the opposite of {w}.",
         "The opposite of {w} is what?", "What word means the opposite of {w}?",
         "What is the reverse of {w}?", "I need the opposite of the word {w}.",
         "What is the opposite of the word {w}?",
         "{w}: what is the opposite?", "If something is not {w}, what is the opposite?",
         "I am looking for the opposite of {w}."]
    return ask(r, "opposites", t, {"w": w}, f"The opposite of {w} is {o}.", [[f"is {o}."]],
        f"the opposite of {w}", w)


def word_form(r, kind=None, word=None):
    kind = kind or r.choice(["synonym", "plural", "past"])
    if kind == "synonym":
        w = word or r.choice(list(SYNONYMS))
        t = ["What is another word for {w}?", "Give me a synonym of {w}.",
            "What is a synonym for {w}?", "Which word means the same as {w}?",
            "Tell me another word for {w}.", "Do you know a synonym for {w}?",
            "Name a word that means {w}.",
             "I need another word for {w}.", "What does {w} mean?",
             "Can you give me another word for {w}?", "Find a synonym of {w}.",
             "Say {w} in another way."]
        return ask(r, "word forms", t, {"w": w}, f"Another word for {w} is {SYNONYMS[w]}.",
            [[f"is {SYNONYMS[w]}."]], f"another word for {w}", (kind, w))
    if kind == "plural":
        w = word or r.choice(list(PLURALS))
        t = ["What is the plural of {w}?", "Give me the plural of {w}.",
            "Tell me the plural of {w}.", "How do you form the plural of {w}?",
            "Do you know the plural of {w}?", "One {w}, two what?",
            "What do you call more than one {w}?", "Plural of {w}?",
             "What is the plural form of {w}?", "Can you tell me the plural of {w}?",
             "I need the plural of the word {w}."]
        return ask(r, "word forms", t, {"w": w}, f"The plural of {w} is {PLURALS[w]}.",
            [[f"is {PLURALS[w]}."]], f"the plural of {w}", (kind, w))
    w = word or r.choice(list(PASTS))
    t = ["What is the past tense of {w}?", "Give me the past tense of {w}.",
        "Tell me the past tense of {w}.", "What is the past of {w}?", "Past tense of {w}?",
        "Do you know the past tense of {w}?", "Today I {w}. Yesterday I what?",
        "How do you say {w} in the past?",
         "What is the past form of {w}?", "Can you put {w} in the past tense?",
         "I need the past tense of the verb {w}."]
    return ask(r, "word forms", t, {"w": w}, f"The past tense of {w} is {PASTS[w]}.",
        [[f"is {PASTS[w]}."]], f"the past tense of {w}", ("past", w))


def colour(r, thing=None):
    x = thing or r.choice(list(COLOURS))
    if thing is None and r.random() < 0.12:
        (a, b), c = r.choice(list(MIXES.items()))
        if r.random() < 0.5:
            a, b = b, a
        t = ["What do you get when you mix {a} and {b}?", "Which colour do {a} and {b} make?",
            "What colour is a mix of {a} and {b}?", "If I mix {a} and {b}, what colour do I get?",
            "Mix {a} with {b}. What is the colour?", "{a} and {b} together make which colour?",
             "What colour do you get from {a} and {b}?",
             "I mixed {a} paint with {b} paint. What colour is it?"]
        return ask(r, "colours", t, {"a": a, "b": b}, f"{a.capitalize()} and {b} make {c}.",
            [[f"make {c}."]], f"mixing {a} and {b}", x)
    c = COLOURS[x]
    t = ["What colour is {x}?", "Which colour is {x}?", "Tell me the colour of {x}.",
        "What is the colour of {x}?", "Do you know the colour of {x}?",
        "Can you tell me what colour {x} is?", "What colour does {x} have?",
        "Name the colour of {x}.",
         "I wonder what colour {x} is.", "Which colour does {x} have?",
         "What colour would you say {x} is?"]
    return ask(r, "colours", t, {"x": x}, f"{x[0].upper() + x[1:]} is {c}.", [[f"is {c}."]],
        f"the colour of {x}", x)


def day(r, which=None, d=None):
    """Asks for the next or previous day or month, or for the length of a month."""
    x = r.random()
    names, unit = (DAYS, "day") if (which or ("day" if x < 0.5 else "month")) == "day" else (MONTHS,
        "month")
    i = r.randrange(len(names)) if d is None else d
    n, name = len(names), names[i]
    if which is None and x > 0.9:
        t = ["How many days are there in {m}?", "How many days does {m} have?", "How long is {m}?",
            "{m} has how many days?", "Tell me how many days {m} has.",
            "What is the number of days in {m}?", "How many days are in {m}?"]
        extra = ", or 29 in a leap year" if name == "February" else ""
        return ask(r, "days and months", t, {"m": name},
            f"{name} has {MONTH_DAYS[name]} days{extra}.", [[f"has {MONTH_DAYS[name]} days"]],
            f"the days in {name}", ("month", i))
    if which is None and x > 0.8:
        o = ORDINALS[i]
        t = ["What is the {o} month of the year?", "Which month is the {o} one?",
            "Name the {o} month.", "Which month comes {o} in the year?",
            "Tell me the {o} month of the year.", "What month is number {k}?"]
        return ask(r, "days and months", t, {"o": o, "k": i + 1}, f"The {o} month is {name}.",
            [[f"is {name.lower()}."]], f"the {o} month", ("month", i))
    if r.random() < 0.6 or which:
        t = ["What {u} comes after {x}?", "Which {u} comes after {x}?",
            "What is the {u} after {x}?", "Which {u} follows {x}?", "Tell me the {u} after {x}.",
            "After {x} comes which {u}?", "What comes after {x}?",
            "Do you know what {u} comes after {x}?",
             "Name the {u} after {x}.", "Which {u} is next after {x}?", "What {u} follows {x}?"]
        if unit == "day":
            t += ["If today is {x}, what day is tomorrow?", "Today is {x}. What is tomorrow?",
                "It is {x} today. Which day is tomorrow?"]
        j = (i + 1) % n
        return ask(r, "days and months", t, {"u": unit, "x": name},
            f"The {unit} after {name} is {names[j]}.", [[f"is {names[j].lower()}."]],
            f"the {unit} after {name}", (unit, j))
    t = ["What {u} comes before {x}?", "Which {u} comes before {x}?", "What is the {u} before {x}?",
        "Tell me the {u} before {x}.", "Before {x} comes which {u}?", "What comes before {x}?",
        "Do you know what {u} comes before {x}?", "Name the {u} before {x}.",
         "Which {u} is right before {x}?"]
    if unit == "day":
        t += ["If today is {x}, what day was yesterday?", "Today is {x}. What was yesterday?",
            "It is {x} today. Which day was yesterday?"]
    j = (i - 1) % n
    return ask(r, "days and months", t, {"u": unit, "x": name},
        f"The {unit} before {name} is {names[j]}.", [[f"is {names[j].lower()}."]],
        f"the {unit} before {name}", (unit, j))


def small(r, top):
    return r.randint(0, min(top, 20)) if r.random() < 0.9 else r.randint(0, top)


def sum_key(a, b):
    """Asks for a sum. One pair in eight is held out.

    As for products, the same numbers in the other order are in training.
    """
    return f"add|{a}|{b}" if a <= b else f"plain: add {a} {b}"


def number(r, n, p=0.06):
    return NUMBER_WORDS[n] if n <= 20 and r.random() < p else str(n)


def add(r):
    a, b = small(r, 30), small(r, 30)
    key = sum_key(a, b)
    x, y, c = number(r, a), number(r, b), a + b
    if r.random() < 0.4:
        t = ["What is {x} + {y}?", "{x} + {y}", "{x} + {y} = ?", "{x}+{y}", "Calculate {x} + {y}.",
            "What's {x} + {y}?", "How much is {x} + {y}?", "{x} + {y} is what?", "Solve {x} + {y}."]
        return ask(r, "addition", t, {"x": a, "y": b}, f"{a} + {b} = {c}.", [[f"= {c}."],
            [f"is {c}."]], f"{a} plus {b}", c, key)
    t = ["What is {x} plus {y}?", "How much is {x} plus {y}?", "Add {x} and {y}.",
        "What is the sum of {x} and {y}?", "Can you add {x} and {y}?", "{x} plus {y}?",
        "Tell me {x} plus {y}.", "What do you get if you add {x} and {y}?",
        "{x} and {y} make how many?",
         "Calculate {x} plus {y}.", "Please add {x} and {y}.", "What does {x} plus {y} make?",
         "If I add {y} to {x}, what do I get?", "Do you know what {x} plus {y} is?",
         "How much do {x} and {y} make together?"]
    return ask(r, "addition", t, {"x": x, "y": y}, f"{a} plus {b} is {c}.", [[f"= {c}."],
        [f"is {c}."]], f"{a} plus {b}", c, key)


def subtract(r):
    a, b = small(r, 30), small(r, 30)
    a, b = max(a, b), min(a, b)
    key, x, y, c = f"subtract|{a}|{b}", number(r, a), number(r, b), a - b
    if r.random() < 0.4:
        t = ["What is {x} - {y}?", "{x} - {y}", "{x} - {y} = ?", "{x}-{y}", "Calculate {x} - {y}.",
            "What's {x} - {y}?", "How much is {x} - {y}?", "Solve {x} - {y}."]
        return ask(r, "subtraction", t, {"x": a, "y": b}, f"{a} - {b} = {c}.", [[f"= {c}."],
            [f"is {c}."]], f"{a} minus {b}", c, key)
    t = ["What is {x} minus {y}?", "How much is {x} minus {y}?", "Subtract {y} from {x}.",
        "What is the difference between {x} and {y}?", "Take {y} away from {x}.", "{x} minus {y}?",
        "Tell me {x} minus {y}.", "What is {x} take away {y}?",
         "Calculate {x} minus {y}.", "If I take {y} from {x}, what is left?",
         "What do you get if you subtract {y} from {x}?", "Do you know what {x} minus {y} is?"]
    return ask(r, "subtraction", t, {"x": x, "y": y}, f"{a} minus {b} is {c}.", [[f"= {c}."],
        [f"is {c}."]], f"{a} minus {b}", c, key)


def multiply(r):
    a, b = r.randint(0, 10), r.randint(0, 10)
    x, y, c = number(r, a), number(r, b), a * b
    # The swapped pair is in training, because the model must learn the table by heart.
    key = f"multiply|{a}|{b}" if a <= b else None
    if r.random() < 0.4:
        t = ["What is {x} * {y}?", "{x} * {y}", "{x} x {y}", "{x} * {y} = ?",
            "Calculate {x} * {y}.", "What is {x} x {y}?", "How much is {x} * {y}?"]
        return ask(r, "multiplication", t, {"x": a, "y": b}, f"{a} * {b} = {c}.", [[f"= {c}."],
            [f"is {c}."]], f"{a} times {b}", c, key or f"multiply swapped {a} {b}")
    t = ["What is {x} times {y}?", "How much is {x} times {y}?", "Multiply {x} by {y}.",
        "What is the product of {x} and {y}?", "{x} times {y}?", "Tell me {x} times {y}.",
        "Calculate {x} times {y}.", "What do you get if you multiply {x} by {y}?",
         "Do you know what {x} times {y} is?", "Can you multiply {x} and {y}?",
         "What does {x} times {y} make?"]
    return ask(r, "multiplication", t, {"x": x, "y": y}, f"{a} times {b} is {c}.", [[f"= {c}."],
        [f"is {c}."]], f"{a} times {b}", c, key or f"multiply swapped {a} {b}")


def number_fact(r):
    """Asks for neighbours, doubles, halves, comparisons, parity or the words of numbers."""
    kind, n, m = r.randrange(9), r.randint(1, 50), r.randint(1, 50)
    if kind == 0:
        return ask(r, "numbers", ["What number comes after {n}?", "Which number comes after {n}?",
            "What is the number after {n}?", "Which number follows {n}?",
            "Tell me the next number after {n}.", "What comes after {n}?"], {"n": n},
                   f"The number after {n} is {n + 1}.", [[f"is {n + 1}."]], f"the number after {n}",
                   n + 1)
    if kind == 1:
        return ask(r, "numbers", ["What number comes before {n}?", "Which number comes before {n}?",
            "What is the number before {n}?", "Tell me the number before {n}.",
            "What comes before {n}?"], {"n": n},
                   f"The number before {n} is {n - 1}.", [[f"is {n - 1}."]],
                   f"the number before {n}", n - 1)
    if kind == 2:
        return ask(r, "numbers", ["What is double {n}?", "Double {n}.", "What is twice {n}?",
            "What is the double of {n}?", "Tell me twice {n}.",
            "How much is two times as many as {n}?"], {"n": n}, f"Double {n} is {2 * n}.",
            [[f"is {2 * n}."]], f"double {n}", 2 * n)
    if kind == 3:
        n *= 2
        return ask(r, "numbers", ["What is half of {n}?", "Half of {n}?",
            "How much is half of {n}?", "Tell me half of {n}.", "Divide {n} by two.",
            "What is {n} divided by 2?", "What do I get if I halve {n}?"], {"n": n},
            f"Half of {n} is {n // 2}.", [[f"is {n // 2}."]], f"half of {n}", n // 2)
    if kind == 4:
        m = m if m != n else n + 1
        t = ["Which is larger, {n} or {m}?", "Which number is bigger, {n} or {m}?",
            "What is more, {n} or {m}?", "Is {n} or {m} larger?",
            "Which one is greater: {n} or {m}?", "Tell me the larger one of {n} and {m}."]
        return ask(r, "numbers", t, {"n": n, "m": m}, f"{max(n, m)} is larger than {min(n, m)}.",
            [[f"{max(n, m)} is larger than {min(n, m)}."]], f"which of {n} and {m} is larger",
            max(n, m), f"larger|{min(n, m)}|{max(n, m)}")
    if kind == 5:
        m = m if m != n else n + 1
        t = ["Which is smaller, {n} or {m}?", "Which number is less, {n} or {m}?",
            "What is less, {n} or {m}?", "Is {n} or {m} smaller?",
            "Which one is smaller: {n} or {m}?", "Tell me the smaller one of {n} and {m}."]
        return ask(r, "numbers", t, {"n": n, "m": m}, f"{min(n, m)} is smaller than {max(n, m)}.",
            [[f"{min(n, m)} is smaller than {max(n, m)}."]], f"which of {n} and {m} is smaller",
            min(n, m), f"smaller|{min(n, m)}|{max(n, m)}")
    if kind == 6:
        word = "even" if n % 2 == 0 else "odd"
        return ask(r, "numbers", ["Is {n} even or odd?", "Is {n} odd or even?",
            "Is the number {n} even?", "Is {n} an odd number?", "Tell me if {n} is even or odd.",
            "Do you know if {n} is odd?", "Even or odd: {n}?"], {"n": n},
                   f"{n} is {a_or_an(word)} number.", [[f"{word} number"]],
                   f"whether {n} is even or odd", n)
    n = r.randint(0, 20)
    if kind == 7:
        return ask(r, "numbers", ["How do you write {n} as a word?",
            "Write the number {n} as a word.", "What is the word for {n}?",
            "Spell out the number {n}.", "Write {n} in words.", "How do you say {n} in words?",
            "What is {n} in words?"], {"n": n},
                   f"The number {n} is written {NUMBER_WORDS[n]}.",
                   [[f"written {NUMBER_WORDS[n]}."]], f"the word for {n}", n)
    return ask(r, "numbers", ["Write {w} as a number.", "Which number is {w}?",
        "What is {w} in digits?", "How do you write {w} as a number?", "Write {w} in digits.",
        "What number is the word {w}?"], {"w": NUMBER_WORDS[n]},
               f"The word {NUMBER_WORDS[n]} is the number {n}.", [[f"the number {n}."]],
               f"the number {NUMBER_WORDS[n]}", n)


def word_problem(r):
    thing, more = r.choice(THINGS), r.random() < 0.5
    while True:
        a, b = r.randint(1, 20), r.randint(1, 15)
        if more:
            key, pair = f"problem add|{a}|{b}|{thing}", sum_key(a, b)
        else:
            a, b = max(a, b), min(a, b)
            key, pair = f"problem subtract|{a}|{b}|{thing}", f"subtract|{a}|{b}"
        if is_held_out(key) or not is_held_out(pair):
            break
    if more:
        t = ["I have {a} {t} and buy {b} more. How many {t} do I have?",
            "If I have {a} {t} and get {b} more, how many do I have?",
            "There are {a} {t} on the table. I add {b}. How many {t} are there now?",
            "I had {a} {t} and found {b} more. How many {t} do I have now?",
             "{n} has {a} {t} and gets {b} more. How many {t} is that?",
             "I have {a} {t} and {n} has {b}. How many {t} do we have together?"]
        c = a + b
    else:
        t = ["I have {a} {t} and give away {b}. How many {t} do I have left?",
            "If I have {a} {t} and lose {b}, how many are left?",
            "There are {a} {t} on the table. I take {b}. How many {t} are left?",
            "I had {a} {t} and sold {b}. How many {t} do I have now?",
             "{n} has {a} {t} and loses {b}. How many {t} are left?",
             "I had {a} {t}, but {b} are gone. How many {t} are left?"]
        c = a - b
    return ask(r, "word problems", t, {"a": a, "b": b, "t": thing, "n": r.choice(NAMES)},
        f"That makes {c} {thing}.", [[f"makes {c} {thing}"]], f"the number of {thing}", c, key)


def count_line(a, b):
    step = 1 if b >= a else -1
    return ", ".join(str(n) for n in range(a, b + step, step)) + "."


def count(r, a=None, b=None):
    kind = r.random()
    if a is None and kind < 0.12:
        n = r.randint(2, 10) * 2
        odd = r.random() < 0.5
        parity = "odd" if odd else "even"
        t = [f"List the {parity} numbers up to {{n}}.", f"Name all {parity} numbers up to {{n}}.",
            f"What are the {parity} numbers up to {{n}}?"]
        if not odd:
            t.insert(0, "Count in twos up to {n}.")
        line = ", ".join(str(k) for k in range(1 if odd else 2, n + 1, 2)) + "."
        return ask(r, "counting", t, {"n": n}, line, [[line]],
            f"the {parity} numbers up to {n}")
    if a is None:
        a = r.randint(0, 5) if kind < 0.6 else r.randint(1, 30)
        b = a + r.randint(3, 12)
        if kind < 0.25:
            a, b = 1, r.randint(3, 30)
        elif r.random() < 0.3:
            a, b = b, a
    t = ["Count from {a} to {b}.", "Can you count from {a} to {b}?",
        "Please count from {a} to {b}.", "Count {a} to {b}.", "List the numbers from {a} to {b}.",
        "Say the numbers from {a} to {b}.", "Write the numbers from {a} to {b}.",
        "Start at {a} and count to {b}.",
         "I want you to count from {a} to {b}.", "Could you list the numbers from {a} to {b}?",
         "Show me the numbers from {a} to {b}."]
    if a > b:
        t = ["Count down from {a} to {b}.", "Count backwards from {a} to {b}.",
            "Count from {a} down to {b}.", "Count from {a} to {b}.",
            "Can you count backwards from {a} to {b}?", "Please count down from {a} to {b}."]
    elif a == 1 and r.random() < 0.4:
        t = ["Count to {b}.", "Can you count to {b}?", "Please count to {b}.",
            "Count up to {b} for me.", "Count up to {b}."]
    return ask(r, "counting", t, {"a": a, "b": b}, count_line(a, b), [[count_line(a, b)]],
        f"counting from {a} to {b}", (a, b), f"count|{a}|{b}")


def spell(r, word=None):
    w = word or r.choice(SPELLING)
    t = ["Spell {w}.", "How do you spell {w}?", "Can you spell {w}?", "Spell the word {w}.",
        "Please spell {w}.", "How is {w} spelled?", "Tell me how to spell {w}.",
        "What is the spelling of {w}?", "Spell {w} for me.", "How do I spell the word {w}?",
        "How do you write {w}?",
         "Could you spell {w}?", "Spell out {w}.", "Give me the letters of {w}.",
         "Which letters are in {w}?", "I need to spell {w}.", "Do you know how to spell {w}?"]
    return ask(r, "spelling", t, {"w": w}, f"{w.capitalize()} is spelled {'-'.join(w)}.",
        [[f"spelled {'-'.join(w)}."]], f"the spelling of {w}", w)


def letters(r, word=None, kind=None):
    w, kind = word or r.choice(SPELLING), r.randrange(4) if kind is None else kind
    if kind == 0:
        return ask(r, "letters", ["How many letters does {w} have?", "How many letters are in {w}?",
            "How many letters are there in the word {w}?", "Count the letters in {w}.",
            "{w} has how many letters?", "How long is the word {w}?"], {"w": w},
                   f"The word {w} has {len(w)} letters.", [[f"has {len(w)} letters"]],
                   f"the letters in {w}", w)
    if kind == 1:
        return ask(r, "letters", ["What is the first letter of {w}?",
            "Which letter does {w} start with?", "{w} starts with which letter?",
            "Tell me the first letter of {w}.", "What letter does {w} begin with?"], {"w": w},
                   f"The first letter of {w} is {w[0]}.", [[f"is {w[0]}."]],
                   f"the first letter of {w}", w)
    if kind == 2:
        return ask(r, "letters", ["What is the last letter of {w}?",
            "Which letter does {w} end with?", "{w} ends with which letter?",
            "Tell me the last letter of {w}.", "What letter does {w} end in?"], {"w": w},
                   f"The last letter of {w} is {w[-1]}.", [[f"is {w[-1]}."]],
                   f"the last letter of {w}", w)
    i = r.randrange(25)
    x = "abcdefghijklmnopqrstuvwxyz"
    return ask(r, "letters", ["What letter comes after {x}?", "Which letter comes after {x}?",
        "What is the letter after {x}?", "Which letter follows {x}?",
        "In the alphabet, what comes after {x}?", "Tell me the letter after {x}.",
        "What is the next letter after {x}?"], {"x": x[i]},
               f"The letter after {x[i]} is {x[i + 1]}.", [[f"is {x[i + 1]}."]],
               f"the letter after {x[i]}")


def animal(r, kind=None, a=None):
    kind = r.randrange(4) if kind is None else kind
    if kind == 0:
        a = a or r.choice(list(SOUNDS))
        t = ["What sound does a {a} make?", "Which sound does a {a} make?", "What does a {a} say?",
            "What noise does a {a} make?", "Tell me the sound of a {a}.", "How does a {a} sound?",
            "Do you know what sound a {a} makes?", "What is the sound of a {a}?"]
        return ask(r, "animals", t, {"a": a}, f"The sound of a {a} is {SOUNDS[a]}.".replace("a owl",
            "an owl"), [[f"is {SOUNDS[a]}."]], f"the sound of {a_or_an(a)}", (kind, a))
    if kind == 1:
        a = a or r.choice(list(YOUNG))
        t = ["What is a baby {a} called?", "What do you call a young {a}?",
            "What is the name for a baby {a}?", "What is a young {a} called?",
            "What do you call a baby {a}?", "Tell me the word for a young {a}.",
            "How do you call the young of a {a}?"]
        return ask(r, "animals", t, {"a": a}, f"A young {a} is called a {YOUNG[a]}.",
            [[f"called a {YOUNG[a]}."]], f"the name of a young {a}", (kind, a))
    if kind == 2:
        a = a or r.choice(list(LEGS))
        t = ["How many legs does {a} have?", "{a} has how many legs?",
            "Do you know how many legs {a} has?", "Tell me how many legs {a} has.",
            "What is the number of legs of {a}?", "How many legs are there on {a}?"]
        n = LEGS[a]
        return ask(r, "animals", t, {"a": a_or_an(a)},
            f"{a_or_an(a).capitalize()} has {NUMBER_WORDS[n] if n else 'no'} legs.",
            [[f"has {NUMBER_WORDS[n] if n else 'no'} legs"]], f"the legs of {a_or_an(a)}", (kind,
            a))
    a = a or r.choice(list(CLASSES))
    c = CLASSES[a]
    t = ["What kind of thing is {a}?", "What is {a}, {x} or {y}?", "Is {a} {x} or {y}?",
        "Is {a} {x}?", "Would you call {a} {x}?", "Tell me if {a} is {x} or {y}."]
    name = a if c == "colour" else a_or_an(a)
    x, y = c, r.choice([k for k in dict.fromkeys(CLASSES.values()) if k != c])
    if r.random() < 0.5:
        x, y = y, x
    i = r.randrange(len(t))
    question = t[i].format(a=name, x=a_or_an(x), y=a_or_an(y))
    if i in (3, 4):
        answer = f"{'Yes' if x == c else 'No'}, {name} is {a_or_an(c)}."
        return Item("animals", f"class|{i}|{a}|{x}", question, answer, [["yes" if x == c else "no,",
            f"is {a_or_an(c)}."]], f"what {name} is", (kind, a))
    return Item("animals", f"class|{i}|{a}|{x}|{y if i else ''}", question[0].upper()
        + question[1:], f"{name[0].upper() + name[1:]} is {a_or_an(c)}.", [[f"is {a_or_an(c)}."]],
        f"what {name} is", (kind, a))


DEFINE = ["What {be} {t}?", "What does {t} mean?", "Explain {t}.", "Can you explain {t}?",
    "Tell me about {t}.", "Could you tell me what {t} {be}?", "Describe {t} for me.",
    "Give me a short explanation of {t}.", "I do not understand {t}. What {be} it?",
          "What do you know about {t}?", "How would you describe {t}?",
          "In simple words, what {be} {t}?", "Please explain {t} in one sentence.",
          "Do you know what {t} {be}?", "What is meant by {t}?", "Define {t}.",
          "Help me understand {t}.", "Explain {t} to a beginner.",
          "What exactly {be} {t}?", "I have heard of {t}. What {be} it?",
          "Please tell me what {t} {be}.", "I want to learn about {t}.",
          "What should I know about {t}?", "Can you describe {t}?"]
WHY = ["Why {does} {t} help?", "Why {be} {t} useful?", "What {be} {t} good for?",
    "What is the use of {t}?", "Why do we need {t}?", "What is the benefit of {t}?",
    "Why would I use {t}?", "How {does} {t} help?", "What is the point of {t}?",
    "Why does Sterna use {t}?"]


def term(r, with_why=False):
    names, be, definition, accept, why = r.choice([x for x in TERMS if x[4]] if with_why else TERMS)
    name = r.choice(names)
    slots = {"t": name, "be": be, "does": "does" if be == "is" else "do"}
    if why and not with_why and r.random() < 0.3:
        return ask(r, "serving terms", WHY, slots, why, [[why.split(" because ")[-1].lower()]],
            f"the use of {name}", None)
    return ask(r, "serving terms", DEFINE, slots, definition, accept, name, why)


def noun(r, word=None):
    w = word or r.choice(list(NOUNS))
    return ask(r, "things", DEFINE, {"t": a_or_an(w), "be": "is"}, NOUNS[w], [[NOUNS[w].lower()]],
        a_or_an(w))


def one_of(r, category, table):
    """Returns an item whose question has no slot.

    One wording in 16 is held out, and one in 8 combinations of wording and prefix.
    """
    topic, questions, answers, accept = r.choice(table)
    core = r.choice(questions)
    affix, question = wrap(r, core, 0.6)
    key = f"{category}|{core}"
    if int(hashlib.md5(key.encode()).hexdigest(), 16) % 16 == 0:
        return Item(category + ", new wording", "held out: " + key, question, r.choice(answers),
            accept, topic)
    return Item(category, f"{key}|{affix}" if affix else "plain: " + key, question,
        r.choice(answers), accept, topic)


FACT_TABLE = [("that", q, [a], accept) for q, a, accept in FACTS]


def fact(r):
    item = one_of(r, "facts", FACT_TABLE)
    item.topic = ""
    return item


def identity(r):
    item = one_of(r, "identity", IDENTITY)
    item.topic = (" " + item.topic).replace(" i ", " I ").strip()
    return item


def small_talk(r):
    item = one_of(r, "small talk", SMALL_TALK)
    item.topic = ""
    return item


def greeting(r):
    g, tail = r.choice(GREETINGS), r.choice(GREETING_TAILS)
    question = g + tail
    if "how" in tail:
        return Item("greetings", f"greet|{g}|{tail}", question,
            "Hello! I am doing well, thank you. How can I help you?", [["doing well"]])
    if "there?" in tail:
        return Item("greetings", f"greet|{g}|{tail}", question,
            "Hello! Yes, I am here. How can I help you?", [["i am here"]])
    if "help" in tail or "question" in tail or "new here" in tail:
        return Item("greetings", f"greet|{g}|{tail}", question,
            "Hello! What would you like to know?", [["what would you like"]])
    start = g if g in ("Good morning", "Good afternoon", "Good evening") else "Hello"
    return Item("greetings", f"greet|{g}|{tail}", question, f"{start}! How can I help you today?",
        [[start.lower() + "! how can i help"]])


def unknown(r):
    x = r.random()
    if x < 0.15:
        name = made_up(r) + (" " + made_up(r) if r.random() < 0.6 else "")
        t = ["Who is {x}?", "Do you know {x}?", "Tell me about {x}.", "Who was {x}?",
            "What did {x} do?", "When was {x} born?", "Have you heard of {x}?", "Is {x} famous?",
            "What do you know about {x}?"]
        return ask(r, "not known", t, {"x": name}, "Sorry, I do not know that name.",
            [["do not know"]], "a name")
    if x < 0.25:
        t = ["What is the capital of {x}?", "Where is {x}?", "Which continent is {x} in?",
            "Tell me the capital of {x}.", "What language is spoken in {x}?",
            "Name the capital of {x}.", "Which city is the capital of {x}?"]
        return ask(r, "not known", t, {"x": made_up(r, ("", "ia", "land", "stan", "ville"))},
            "Sorry, I do not know that place.", [["do not know"]], "a place")
    if x < 0.32:
        t = ["What is {x}?", "What does {x} mean?", "Explain {x}.", "Can you explain {x}?",
            "Define {x}.", "What is a {x}?", "Do you know what {x} is?"]
        return ask(r, "not known", t, {"x": made_up(r).lower()}, "Sorry, I do not know that word.",
            [["do not know"]], "a word")
    topic, templates, things, answer = r.choice(UNKNOWN)
    return ask(r, "not known", templates, {"t": r.choice(things)}, answer,
        [[answer.lower().rstrip(".")]], topic)


PLACES = ["in a green forest", "near a quiet river", "on a high mountain", "in a small village",
    "by the blue sea", "in an old garden", "on a little island", "in a big city",
    "under a tall tree", "behind a red house"]
FINDS = ["key", "ball", "hat", "book", "stone", "box", "lamp", "bell", "boat", "flower", "map",
    "coin"]


def story(r, long=None):
    """Tells a story: a short one of at most 64 tokens, or a long one of over a hundred."""
    a, name, friend = r.choice(ANIMALS), r.choice(NAMES), r.choice(NAMES)
    while friend == name:
        friend = r.choice(NAMES)
    place, thing = r.choice(PLACES), r.choice(FINDS)
    c, b = r.choice(PLAIN_COLOURS[:8]), r.choice(ANIMALS)
    long = r.random() < 0.4 if long is None else long
    size = "long" if long else "short"
    given = r.random() < 0.5
    t = [f"Tell me a {size} story about {{a}}.", f"Can you tell me a {size} story about {{a}}?",
        f"I want to hear a {size} story about {{a}}.", f"Write a {size} story about {{a}}.",
        f"Please tell me a {size} story about {{a}}.", f"Do you know a {size} story about {{a}}?",
         f"Make up a {size} story about {{a}}.", f"Give me a {size} story about {{a}}."]
    if long:
        t += ["Tell me a story about {a}.", "Tell a story about {a}.",
            "I would like a story about {a}.", "Can you tell me a story about {a}?"]
    who = (a_or_an(a) + " called " + name) if given else a_or_an(a)
    if given and r.random() < 0.3:
        t, who = ["Tell me a " + size + " story about {a}.", "Write a " + size
            + " story about {a}."], f"{name} the {a}"
    if not long:
        bodies = [
            (f"{name} the {a} lived {place}. One day {name} found {a_or_an(c)} {thing} and gave it "
             f"to {friend}. They became good friends. The end."),
                  (f"Once there was {a_or_an(a)} called {name}. {name} lived {place} and lost "
                   f"{a_or_an(c)} {thing}. {friend} helped to find it, and {name} was happy. The "
                   f"end."),
                  (f"{name} was a little {a} who lived {place}. One night {name} saw {a_or_an(c)} "
                   f"{thing} and dreamed of it until the morning. The end.")]
    else:
        bodies = [
            f"Once upon a time there was {a_or_an(a)} called {name}. {name} lived {place}. Every "
            f"morning {name} went for a walk and looked at the sky. One day {name} found "
            f"{a_or_an(c)} {thing} on the ground. \"Whose {thing} is this?\" asked {name}. "
                  f"Nobody knew. So {name} asked {friend}, who was a wise old {b}. \"It is "
                  f"mine,\" said {friend}. \"I lost it a long time ago.\" {name} gave the {thing} "
                  f"back, and {friend} was very happy. \"Thank you,\" said {friend}. \"Please "
                  f"stay for dinner.\" "
                  f"They ate, laughed and talked until the stars came out. From that day on, "
                  f"{name} and {friend} were the best of friends. The end.",
                  f"Once upon a time there was a young {a} called {name}, who lived {place}. "
                  f"{name} had {a_or_an(c)} {thing} and loved it very much. But one day the wind "
                  f"was strong, and the {thing} was gone. {name} was sad and began to look for "
                  f"it. "
                  f"{name} looked in the morning. {name} looked in the evening. Then {name} met "
                  f"{friend}, a friendly {b}. \"Why are you sad?\" asked {friend}. \"I lost my "
                  f"{c} {thing},\" said {name}. \"I will help you,\" said {friend}. "
                  f"Together they looked everywhere, and at last they found it behind a big "
                  f"stone. {name} was happy again and said thank you. Then they both went home "
                  f"and slept well. The end."]
    key = f"story|{size}|{a}|{name if given else t[0][:12]}"
    return ask(r, "stories", t, {"a": who}, r.choice(bodies), [[a, "the end."] + ([name.lower()]
        if given else [])], f"a story about {a_or_an(a)}", (a, name, place, thing, c), key)


# ---------------------------------------------------------------- chats

SINGLE = [(greeting, 4), (small_talk, 7), (identity, 8), (term, 10), (noun, 4), (fact, 6), (capital,
    8), (continent, 2.5), (language, 2.5), (opposite, 5), (word_form, 5), (colour, 4), (day, 5),
    (add, 16), (subtract, 15), (multiply, 8), (number_fact, 10),
          (word_problem, 8), (count, 5), (spell, 6), (letters, 6), (animal, 5), (unknown, 9),
           (story, 2)]


def item(r, held_out=False, makers=SINGLE):
    """Returns a random item from the training side, or from the held-out side."""
    make = r.choices([m for m, _ in makers], [w for _, w in makers])[0]
    while True:
        it = make(r)
        if is_held_out(it.key) == held_out:
            return it


def turn(it):
    return (it.question, it.answer, it.accept, it.topic)


AND = ["And {x}?", "What about {x}?", "How about {x}?", "And what about {x}?", "Now {x}.", "{x}?"]
AND_OF = ["And of {x}?", "And {x}?", "What about {x}?", "How about {x}?", "And for {x}?",
    "Now {x}.", "And that of {x}?", "The same for {x}?"]
ASKED = ["What did I just ask?", "What did I ask you?", "What was my question?",
    "What was my last question?", "Can you tell me what I asked?", "What was I asking about?",
    "Do you remember my question?"]
FIRST = ["What was my first question?", "What did I ask first?",
    "What was the first thing that I asked?", "Do you remember my first question?"]
REPEAT = ["Can you repeat that?", "Say that again.", "Please repeat your answer.",
    "What did you just say?", "Once more, please.", "Sorry, can you say that again?",
    "Repeat that.", "What was your answer?", "Could you repeat the last answer?"]
SURE = ["Are you sure?", "Really?", "Is that right?", "Are you certain?", "Is that true?",
    "Is this correct?"]
JOIN = ["", "", "", "And ", "Now, ", "Also, ", "Okay, ", "Thanks. ", "Great. ", "And now: "]


def again(r, previous, first=None):
    """Returns a follow-up that works after any answer."""
    question, answer, _, topic = previous
    x = r.random()
    if x < 0.35 and topic:
        return (r.choice(ASKED), f"You asked about {topic}.", [[f"about {topic.lower()}."]], "")
    if x < 0.5 and first and first[3]:
        return (r.choice(FIRST), f"Your first question was about {first[3]}.",
            [[f"about {first[3].lower()}."]], "")
    if x < 0.75 and len(answer) < 140:
        return (r.choice(REPEAT), answer, [[answer.lower()]], "")
    if x < 0.9 and topic and len(answer) < 100 and not answer.startswith(("Yes", "No", "Sorry",
            "I ")):
        return (r.choice(SURE), f"Yes, I am sure. {answer}", [["sure", answer.lower()]], "")
    return turn(item(r, makers=[(small_talk, 1)]))


def filled(r, templates, **slots):
    text = r.choice(templates).format(**slots)
    return text[0].upper() + text[1:]


def chain(r, kind=None):
    """Makes a chat whose later questions need the earlier ones.

    Returns its key, its kind and its turns.
    """
    while True:
        try:
            return make_chain(r, kind)
        except WrongSide:
            pass


def make_chain(r, kind):
    kind = kind or r.choices(list(CHAINS), [w for w in CHAINS.values()])[0]
    turns = []
    if kind == "capitals":
        countries = r.sample([c for c in CAPITALS if c in CONTINENTS], 3)
        turns.append(turn(train_like(r, lambda: ask_capital(r, countries[0]))))
        for c in countries[1:r.choice([2, 3, 3])]:
            turns.append((filled(r, AND_OF, x=c), f"The capital of {c} is {CAPITALS[c]}.",
                [[CAPITALS[c].lower()]], f"the capital of {c}"))
        if len(turns) == 2 or r.random() < 0.4:
            c = countries[len(turns) - 1]
            if c in LANGUAGES and r.random() < 0.5:
                turns.append((r.choice(["Which language do people speak there?",
                    "What language is spoken there?", "What do people speak there?",
                    "And which language do they speak?"]), f"People in {c} speak {LANGUAGES[c]}.",
                    [[f"speak {LANGUAGES[c].lower()}"]], f"the language of {c}"))
            else:
                turns.append((r.choice(["Which continent is that in?", "Which continent is it in?",
                    "On which continent is that country?", "And which continent is that?",
                    "What continent is that on?"]),
                    f"{c[0].upper() + c[1:]} is in {CONTINENTS[c]}.",
                    [[f"in {CONTINENTS[c].lower()}."]], f"where {c} is"))
        slots = countries
    elif kind == "opposites":
        w1, w2, w3 = slots = r.sample(list(OPPOSITES), 3)
        turns.append(turn(train_like(r, lambda: opposite(r, w1))))
        if r.random() < 0.4:
            turns.append((r.choice(["And what is the opposite of that?",
                "What is the opposite of that?", "And the opposite of that word?",
                "Now the opposite of your answer."]), f"The opposite of {OPPOSITES[w1]} is {w1}.",
                [[f"is {w1}."]], f"the opposite of {OPPOSITES[w1]}"))
        else:
            turns.append((filled(r, AND_OF, x=w2), f"The opposite of {w2} is {OPPOSITES[w2]}.",
                [[f"is {OPPOSITES[w2]}."]], f"the opposite of {w2}"))
        turns.append((filled(r, AND_OF, x=w3), f"The opposite of {w3} is {OPPOSITES[w3]}.",
            [[f"is {OPPOSITES[w3]}."]], f"the opposite of {w3}"))
    elif kind == "word forms":
        form = r.choice(["synonym", "plural", "past"])
        table, label = {"synonym": (SYNONYMS, "Another word for {w} is {a}."), "plural": (PLURALS,
            "The plural of {w} is {a}."), "past": (PASTS, "The past tense of {w} is {a}.")}[form]
        slots = r.sample(list(table), 3)
        turns.append(turn(train_like(r, lambda: word_form(r, form, slots[0]))))
        for w in slots[1:r.choice([2, 3])]:
            turns.append((filled(r, AND_OF, x=w), label.format(w=w, a=table[w]),
                [[f"is {table[w]}."]], label.format(w=w, a="")[:-5].lower()))
    elif kind == "colours":
        slots = r.sample(list(COLOURS), 3)
        turns.append(turn(train_like(r, lambda: colour(r, slots[0]))))
        for x in slots[1:r.choice([2, 3])]:
            turns.append((filled(r, AND, x=x), f"{x[0].upper() + x[1:]} is {COLOURS[x]}.",
                [[f"is {COLOURS[x]}."]], f"the colour of {x}"))
    elif kind == "days":
        unit = r.choice(["day", "month"])
        names = DAYS if unit == "day" else MONTHS
        start = r.randrange(len(names))
        first = train_like(r, lambda: day(r, unit, start))
        turns.append(turn(first))
        at, slots = first.value[1], [unit, start]
        for _ in range(r.choice([1, 2])):
            x = r.random()
            if x < 0.5:
                new = (at + 1) % len(names)
                q = r.choice([f"And the {unit} after that?", f"And after that?",
                    "And the next one?", f"What comes after that?", f"And which {unit} comes next?",
                    "And then?"])
                turns.append((q, f"The {unit} after {names[at]} is {names[new]}.",
                    [[f"is {names[new].lower()}."]], f"the {unit} after {names[at]}"))
                slots.append("after")
            else:
                if x < 0.75:
                    at = r.randrange(len(names))
                    q = filled(r, ["And after {x}?", "What about {x}?", "And {x}?",
                        "How about after {x}?"], x=names[at])
                    new = (at + 1) % len(names)
                    turns.append((q, f"The {unit} after {names[at]} is {names[new]}.",
                        [[f"is {names[new].lower()}."]], f"the {unit} after {names[at]}"))
                else:
                    if r.random() < 0.5:
                        at = r.randrange(len(names))
                        q = f"And before {names[at]}?"
                    else:
                        q = r.choice([f"And which {unit} comes before that?", "And before that?",
                            f"What is the {unit} before that?"])
                    new = (at - 1) % len(names)
                    turns.append((q, f"The {unit} before {names[at]} is {names[new]}.",
                        [[f"is {names[new].lower()}."]], f"the {unit} before {names[at]}"))
                slots.append(names[at])
            at = new
    elif kind == "sums":
        first = train_like(r, lambda: r.choice([add, add, subtract, multiply])(r))
        while first.value > 60:
            first = train_like(r, lambda: add(r))
        turns.append(turn(first))
        n, slots = first.value, [first.topic]
        while len(turns) < r.choice([2, 3, 3]):
            d, x, a1, b1 = r.randint(1, 10), r.random(), r.randint(0, 20), r.randint(0, 20)
            if any(is_held_out(k) for k in (sum_key(n, d), sum_key(a1, b1), f"subtract|{n}|{d}")):
                continue
            if x < 0.4:
                q, a, m, topic = filled(r, ["And plus {d}?", "Add {d} to that.", "Now add {d}.",
                    "Plus {d}?", "And {d} more?", "And if I add {d}?", "What is that plus {d}?"],
                    d=d), f"{n} plus {d} is {n + d}.", n + d, f"{n} plus {d}"
            elif x < 0.65 and n >= d:
                q, a, m, topic = filled(r, ["And minus {d}?", "Take away {d}.", "Now subtract {d}.",
                    "Minus {d}?", "And if I take away {d}?", "What is that minus {d}?",
                    "Subtract {d} from that."],
                    d=d), f"{n} minus {d} is {n - d}.", n - d, f"{n} minus {d}"
            elif x < 0.75 and n <= 50:
                q, a, m, topic = r.choice(["Double that.", "And twice that?",
                    "What is double that?",
                    "Now double it."]), f"Double {n} is {2 * n}.", 2 * n, f"double {n}"
            else:
                q, a, m, topic = filled(r, ["And {a} plus {b}?", "What about {a} plus {b}?",
                    "Now {a} plus {b}."], a=a1,
                    b=b1), f"{a1} plus {b1} is {a1 + b1}.", a1 + b1, f"{a1} plus {b1}"
            turns.append((q, a, [[f"is {m}."]], topic))
            slots.append(topic)
            n = m
    elif kind == "counting":
        a, b = fresh_range(r, 10) if not SIDE["held_out"] else (n := r.randint(0, 10), n
            + r.randint(3, 9))
        slots = [a, b]
        turns.append(turn(train_like(r, lambda: count(r, a, b))))
        if r.random() < 0.6:
            turns.append((r.choice(["And backwards?", "Now backwards.", "Now count backwards.",
                "Now the other way round.", "Can you do it backwards?"]), count_line(b, a),
                [[count_line(b, a)]], f"counting from {b} to {a}"))
        else:
            c, d = fresh_range(r, 12)
            slots += [c, d]
            turns.append((filled(r, ["And from {c} to {d}?", "Now from {c} to {d}.",
                "And {c} to {d}?", "Now count from {c} to {d}."], c=c, d=d), count_line(c, d),
                [[count_line(c, d)]], f"counting from {c} to {d}"))
    elif kind == "spelling":
        w1, w2 = slots = r.sample(SPELLING, 2)
        turns.append(turn(train_like(r, lambda: spell(r, w1))))
        if r.random() < 0.6:
            turns.append((filled(r, AND, x=w2), f"{w2.capitalize()} is spelled {'-'.join(w2)}.",
                [[f"spelled {'-'.join(w2)}."]], f"the spelling of {w2}"))
            w1 = w2
        if len(turns) == 1 or r.random() < 0.6:
            x = r.randrange(3)
            q = [["How many letters is that?", "How many letters does it have?",
                "How many letters are there?"], ["What is the first letter?",
                "Which letter is first?", "What letter does it start with?"],
                ["What is the last letter?", "Which letter is last?",
                "What letter does it end with?"]][x]
            a = [f"The word {w1} has {len(w1)} letters.", f"The first letter of {w1} is {w1[0]}.",
                f"The last letter of {w1} is {w1[-1]}."][x]
            turns.append((r.choice(q), a, [[a.lower().split(w1)[-1].strip()]],
                [f"the letters in {w1}", f"the first letter of {w1}",
                f"the last letter of {w1}"][x]))
    elif kind == "animals":
        what = r.randrange(3)
        table = [SOUNDS, YOUNG, LEGS][what]
        slots = r.sample(list(table), 3)
        turns.append(turn(train_like(r, lambda: animal(r, what, slots[0]))))
        for a in slots[1:r.choice([2, 3])]:
            it = animal(r, what, a)
            turns.append((filled(r, AND, x=a_or_an(a)), it.answer, it.accept, it.topic))
    elif kind == "why":
        first = train_like(r, lambda: term(r, True))
        while not first.value:
            first = train_like(r, lambda: term(r, True))
        turns.append(turn(first))
        turns.append((r.choice(["Why does it help?", "Why is that useful?",
            "What is that good for?", "And why does that help?", "Why do we need that?",
            "What is the benefit?", "How does that help?"]), first.value,
            [[first.value.split(" because ")[-1].lower()]], f"the use of {first.topic}"))
        slots = [first.topic, first.question]
    elif kind == "story":
        first = train_like(r, lambda: story(r))
        turns.append(turn(first))
        a, name, place, thing, c = first.value
        slots = [a, name]
        asks = [(["What was the {a} called?", "What was the name of the {a}?",
            "Who was the story about?", "What was its name?"], f"The {a} was called {name}.",
            [[name.lower()]]),
                (["Where did the {a} live?", "Where did {n} live?", "Where was that?"],
                 f"{name} lived {place}.", [[place]]),
                (["What colour was the {t}?", "Which colour did the {t} have?"],
                 f"The {thing} was {c}.", [[f"was {c}."]])]
        for q, answer, accept in r.sample(asks, r.choice([1, 2, 2])):
            turns.append((filled(r, q, a=a, n=name, t=thing), answer, accept, ""))
    else:  # memory: something about the user, something else, and the question about it
        told = r.sample(["name", "pet", "colour", "food", "city", "age", "animal", "number",
            "friend"], r.choice([1, 1, 2]))
        slots, later = [], []
        for what in told:
            q, a, question, answer, value = remember(r, what)
            slots.append(value)
            turns.append((q, a, [[value.lower()]], ""))
            later.append((r.choice(question), answer, [[answer.lower().rstrip(".").split(" ",
                2)[-1]]], ""))
        if len(told) == 1 or r.random() < 0.4:
            for _ in range(r.choice([0, 1, 1, 1, 2])):
                it = item(r)
                turns.append((wrap(r, it.question, 0.2)[1],) + turn(it)[1:])
        r.shuffle(later)
        turns += later
    key = f"chain|{kind}|" + "|".join(str(s) for s in slots)
    return key, kind, turns


def fresh_range(r, top):
    """Returns the first and the last number of a count, in training in both directions."""
    while True:
        a = r.randint(0, top)
        b = a + r.randint(3, 9)
        if not is_held_out(f"count|{a}|{b}") and not is_held_out(f"count|{b}|{a}"):
            return a, b


def ask_capital(r, c):
    return capital(r, c)


def train_like(r, make):
    """Returns the opening question of a chain, from the side that the caller works on."""
    for _ in range(60):
        it = make()
        if is_held_out(it.key) == SIDE["held_out"]:
            return it
    raise WrongSide  # These slots have no opening on this side.


class WrongSide(Exception):
    pass


SIDE = {"held_out": False}

CHAINS = {"capitals": 4, "opposites": 3, "word forms": 2, "colours": 2, "days": 3, "sums": 5,
    "counting": 1.5, "spelling": 3, "animals": 2, "why": 2, "story": 2, "memory": 7}


def remember(r, what):
    """Returns a statement of the user, the reply, later questions, their answer and its word."""
    if what == "name":
        n = r.choice(NAMES)
        says = ["My name is {n}.", "I am {n}.", "I'm {n}.", "You can call me {n}.",
            "Hello, my name is {n}.", "Hi, I am {n}.", "Call me {n}.", "Hello! I am {n}.",
            "People call me {n}.", "Hi, my name is {n}. Nice to meet you."]
        return filled(r, says, n=n), f"Nice to meet you, {n}!", ["What is my name?",
            "Do you remember my name?", "Who am I?", "What am I called?",
            "Can you tell me my name?", "Say my name.",
            "Do you know who I am?"], f"Your name is {n}.", n
    if what == "pet":
        a, n = r.choice(["dog", "cat", "rabbit", "horse", "mouse", "bird"]), r.choice(PETS)
        return (filled(r, ["I have a {a} called {n}.", "My {a} is called {n}.",
            "My {a}'s name is {n}.", "I have a {a}. Its name is {n}.",
            "The name of my {a} is {n}."], a=a, n=n), f"{n} is a lovely name for a {a}.",
                [f"What is my {a} called?", f"What is the name of my {a}?",
                 f"Do you remember the name of my {a}?", f"What is my {a}'s name?"],
                 f"Your {a} is called {n}.", n)
    if what == "friend":
        n = r.choice(NAMES)
        return (filled(r, ["My best friend is {n}.", "My best friend is called {n}.",
            "{n} is my best friend.", "I have a best friend called {n}."], n=n),
            f"It is nice to have a friend like {n}.",
                ["Who is my best friend?", "What is my best friend called?",
                 "Do you remember my best friend?", "What is the name of my best friend?"],
                 f"Your best friend is {n}.", n)
    if what == "city":
        n = r.choice(CITIES)
        return (filled(r, ["I live in {n}.", "I am from {n}.", "My home is in {n}.",
            "I come from {n}.", "My city is {n}."], n=n), f"{n} sounds like a nice place.",
                ["Where do I live?", "Which city do I live in?", "Where am I from?",
                 "What is my city?", "Do you remember where I live?"], f"You live in {n}.", n)
    if what == "age":
        n = str(r.randint(5, 80))
        return (filled(r, ["I am {n} years old.", "My age is {n}.", "I turned {n} this year.",
            "I'm {n} years old."], n=n), f"{n} is a good age.",
                ["How old am I?", "What is my age?", "Do you remember my age?",
                 "Can you tell me how old I am?"], f"You are {n} years old.", n)
    values = {"colour": PLAIN_COLOURS, "food": FOODS, "animal": ANIMALS, "number": [str(n)
        for n in range(1, 31)]}[what]
    n = r.choice(values)
    return (filled(r, [f"My favourite {what} is {{n}}.",
        f"I like {{n}}. It is my favourite {what}.", f"{{n}} is my favourite {what}.",
        f"Of all {what}s, I like {{n}} best." if what != "food" else "My favourite food is {n}."],
        n=n), f"{n[0].upper() + n[1:]} is a good choice.",
            [f"What is my favourite {what}?", f"Do you remember my favourite {what}?",
             f"Which {what} do I like best?", f"Tell me my favourite {what}."],
             f"Your favourite {what} is {n}.", n)


def training_chat(r, banned=frozenset()):
    """Returns one chat: (system message or None, [(user, assistant), ...])."""
    while True:
        x = r.random()
        if x < 0.5:
            it = item(r)
            turns = [(it.question if it.category in ("identity", "small talk", "facts") else wrap(r,
                it.question)[1], ) + turn(it)[1:]]
        elif x < 0.68:
            turns = []
            for i in range(r.choice([2, 2, 3, 3, 4])):
                it = item(r)
                q = it.question if it.category in ("identity", "small talk", "facts") else wrap(r,
                    it.question, 0.2)[1]
                turns.append((q,) + turn(it)[1:])
        else:
            key, _, turns = chain(r)
            if is_held_out(key):
                continue
            if r.random() < 0.2:
                start = item(r, makers=[(greeting, 2), (small_talk, 1), (identity, 1)])
                turns.insert(0, turn(start))
        if r.random() < (0.12 if x < 0.5 else 0.25):
            turns.append(again(r, turns[-1], turns[0] if len(turns) > 1 else None))
        if r.random() < 0.05:
            turns.append(turn(item(r, makers=[(small_talk, 1)])))
        chat = [(typed(r, t[0]), t[1]) for t in turns]
        if any(normal(q) in banned for q, _ in chat):
            continue
        return (r.choice(SYSTEMS) if r.random() < 0.12 else None), chat


def training_chats(n, seed, banned=frozenset()):
    r = random.Random(seed)
    return [training_chat(r, banned) for _ in range(n)]


# ---------------------------------------------------------------- held-out questions

HELD_OUT = {"greeting": 8, "small_talk": 16, "identity": 20, "term": 36, "noun": 12, "fact": 16,
    "capital": 28, "continent": 8, "language": 8, "opposite": 18, "word_form": 16, "colour": 12,
    "day": 16, "add": 20, "subtract": 16,
            "multiply": 10, "number_fact": 16, "word_problem": 8, "count": 12, "spell": 14,
            "letters": 10, "animal": 12, "unknown": 24, "story": 8}


def held_out(seed=20):
    """Returns the held-out questions and chats.

    Half of the questions are plain. The others have an affix or are typed carelessly.
    """
    r = random.Random(seed)
    singles, seen, keys = [], set(), set()
    for name, n in HELD_OUT.items():
        made = 0
        while made < n and len(keys) < 10_000:
            it = item(r, True, [(globals()[name], 1)])
            if name == "story" and "long" in it.key or len(it.answer) > 230:
                continue
            q = it.question
            if it.category.split(",")[0] not in ("identity", "small talk", "facts"):
                q = wrap(r, q, 0.3)[1]
            if r.random() < 0.2:
                q = q.lower().rstrip(".?!")
            if normal(q) in seen or it.key in keys:
                continue
            seen.add(normal(q))
            keys.add(it.key)
            singles.append({"category": it.category, "question": q, "answer": it.answer,
                "accept": [[s.lower() for s in any_of] for any_of in it.accept]})
            made += 1
    chats, kinds = [], ["memory", "memory", "memory", "memory", "capitals", "capitals", "capitals",
        "opposites", "opposites", "sums", "sums", "sums", "days", "days", "spelling", "colours",
        "animals", "word forms", "capitals", "opposites"]
    SIDE["held_out"] = True
    for kind in kinds:
        while True:
            key, _, turns = chain(r, kind)
            while len(turns) < 3:
                turns.append(again(r, turns[-1], turns[0]))
            if len(turns) == 3 and is_held_out(key) and (kind == "memory"
                    or normal(turns[0][0]) not in seen):
                break
        chats.append({"category": kind, "turns": [{"question": t[0], "answer": t[1],
            "accept": [[s.lower() for s in any_of] for any_of in t[2]]} for t in turns]})
    SIDE["held_out"] = False
    return {"max_tokens": 64, "singles": singles, "chats": chats}


def banned_questions(held):
    """Returns the held-out questions, which must not be in the training text word for word."""
    openings = [c["turns"][0]["question"] for c in held["chats"] if c["category"] != "memory"]
    return frozenset(normal(s["question"]) for s in held["singles"]) | frozenset(normal(q)
        for q in openings)


if __name__ == "__main__":
    sample = random.Random(1)
    for _ in range(60):
        print(training_chat(sample))
