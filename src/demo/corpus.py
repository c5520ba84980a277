"""The text that the demo model is trained on: short chats made from templates and slots.

Every item has a key that names its combination of template and slots. A hash of the key sends one key in eight to the
held-out side: training never sees such a combination, and the held-out questions use nothing else.
"""

import hashlib
import random
from dataclasses import dataclass, field

HELD_OUT_ONE_IN = 8


def is_held_out(key):
    return int.from_bytes(hashlib.md5(key.encode()).digest()[:4], "little") % HELD_OUT_ONE_IN == 0


def normal(text):
    """Lower case, letters and digits and operators only: what counts as the same question word for word."""
    kept = "".join(c if c.isalnum() or c in "+-*/=" else " " for c in text.lower())
    return " ".join(kept.split())


@dataclass
class Item:
    category: str
    key: str
    question: str
    answer: str
    accept: list                    # Any of these lists; of a list, every string (lower case) must be in the answer.
    topic: str = ""                 # "You asked about <topic>."
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

EUROPE = """France Italy Spain Germany Portugal England Scotland Wales Ireland Norway Sweden Finland Denmark Iceland Poland Austria Hungary
Greece Belgium Switzerland Ukraine Romania Bulgaria Croatia Serbia""".split() + ["the Netherlands", "the Czech Republic"]
CONTINENTS = {c: "Europe" for c in EUROPE}
CONTINENTS |= {c: "Africa" for c in "Egypt Kenya Ghana Morocco Ethiopia Nigeria Senegal Tunisia".split()}
CONTINENTS |= {c: "Asia" for c in ["Japan", "China", "India", "Thailand", "Vietnam", "South Korea", "Nepal", "Iran", "Iraq", "the Philippines"]}
CONTINENTS |= {c: "North America" for c in ["Canada", "the United States", "Mexico", "Cuba"]}
CONTINENTS |= {c: "South America" for c in "Brazil Argentina Chile Peru Colombia Uruguay".split()}

LANGUAGES = {"France": "French", "Italy": "Italian", "Spain": "Spanish", "Germany": "German", "Portugal": "Portuguese", "England": "English",
             "Norway": "Norwegian", "Sweden": "Swedish", "Finland": "Finnish", "Denmark": "Danish", "Iceland": "Icelandic", "Poland": "Polish",
             "Austria": "German", "Hungary": "Hungarian", "Greece": "Greek", "the Netherlands": "Dutch", "Russia": "Russian", "Turkey": "Turkish",
             "Japan": "Japanese", "China": "Chinese", "Thailand": "Thai", "Vietnam": "Vietnamese", "South Korea": "Korean", "Mexico": "Spanish",
             "Brazil": "Portuguese", "Argentina": "Spanish", "Chile": "Spanish", "Cuba": "Spanish", "Australia": "English", "Egypt": "Arabic"}

OPPOSITE_PAIRS = [p.split("/") for p in """hot/cold big/small fast/slow up/down day/night happy/sad good/bad old/young rich/poor light/dark
long/short high/low open/closed early/late hard/soft full/empty wet/dry clean/dirty strong/weak loud/quiet left/right front/back top/bottom
inside/outside first/last begin/end buy/sell give/take push/pull win/lose love/hate yes/no true/false near/far thick/thin wide/narrow
deep/shallow heavy/weightless sweet/sour brave/cowardly easy/difficult cheap/expensive safe/dangerous smooth/rough sharp/blunt
friend/enemy start/stop come/go always/never everything/nothing before/after above/below more/less north/south east/west
summer/winter man/woman boy/girl king/queen brother/sister laugh/cry remember/forget question/answer polite/rude awake/asleep
alive/dead arrive/leave""".split()]
OPPOSITES = {}
for _a, _b in OPPOSITE_PAIRS:
    OPPOSITES[_a], OPPOSITES[_b] = _b, _a

SYNONYMS = dict(p.split("/") for p in """large/big tiny/small quick/fast glad/happy unhappy/sad begin/start finish/end smart/clever
wealthy/rich shout/yell silent/quiet simple/easy correct/right wrong/incorrect scared/afraid angry/mad pretty/beautiful
tired/sleepy strange/odd speak/talk choose/pick gift/present infant/baby road/street help/assist sick/ill""".split())

PLURALS = dict(p.split("/") for p in """cat/cats dog/dogs child/children mouse/mice tooth/teeth foot/feet man/men woman/women goose/geese
box/boxes bus/buses leaf/leaves knife/knives wolf/wolves baby/babies city/cities book/books house/houses apple/apples tree/trees
fish/fish sheep/sheep star/stars bird/birds flower/flowers key/keys potato/potatoes tomato/tomatoes story/stories glass/glasses
wife/wives shelf/shelves person/people day/days country/countries""".split())

PASTS = dict(p.split("/") for p in """go/went eat/ate see/saw run/ran drink/drank write/wrote sing/sang swim/swam give/gave take/took
come/came make/made buy/bought think/thought bring/brought find/found sleep/slept speak/spoke break/broke drive/drove fly/flew
grow/grew know/knew walk/walked play/played jump/jumped look/looked help/helped talk/talked cook/cooked""".split())

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
MIXES = {("red", "blue"): "purple", ("red", "yellow"): "orange", ("blue", "yellow"): "green", ("black", "white"): "grey",
         ("red", "white"): "pink"}

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
MONTH_DAYS = dict(zip(MONTHS, [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]))
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
NUMBER_WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
nineteen twenty""".split()

SPELLING = """cat dog house tree water bread apple school friend music table chair green yellow orange purple happy river mountain
window garden flower summer winter spring autumn monday friday sunday king queen castle horse sheep rabbit tiger lion monkey elephant
giraffe zebra snake eagle pigeon chicken fish whale dolphin shark ship boat train plane bicycle car street city village country island
ocean beach sand stone gold silver iron paper pencil book letter number word story poem song piano guitar drum dance doctor teacher
farmer baker sister brother mother father baby child family people heart hand foot head nose mouth tooth hair milk butter cheese
egg sugar salt pepper potato tomato carrot onion lemon banana cherry grape melon cake cookie honey soup rice night morning evening
star moon sun cloud rain snow wind storm fire light shadow dream sleep smile laugh kitchen door floor roof wall bridge clock
rust token model cache memory computer sterna""".split()

SOUNDS = dict(p.split("/") for p in """dog/bark cat/meow cow/moo sheep/baa duck/quack lion/roar horse/neigh pig/oink bee/buzz frog/croak
owl/hoot snake/hiss wolf/howl rooster/crow mouse/squeak bird/chirp""".split())
YOUNG = dict(p.split("/") for p in """dog/puppy cat/kitten cow/calf sheep/lamb duck/duckling horse/foal pig/piglet goat/kid hen/chick
frog/tadpole lion/cub bear/cub goose/gosling deer/fawn swan/cygnet kangaroo/joey""".split())
LEGS = {"dog": 4, "cat": 4, "horse": 4, "cow": 4, "sheep": 4, "elephant": 4, "spider": 8, "ant": 6, "bee": 6, "fly": 6, "duck": 2, "hen": 2,
        "snake": 0, "fish": 0, "frog": 4, "pig": 4, "lion": 4, "octopus": 0, "chair": 4, "person": 2, "beetle": 6, "owl": 2, "goat": 4}
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

NAMES = """Anna Ben Clara David Emma Felix Grace Henry Ivy Jack Kate Leo Maria Noah Olivia Paul Rosa Sam Tara Victor Wendy Yusuf Zoe Alice
Bob Carlos Diana Erik Fatima George Hanna Ian Julia Karl Lina Marco Nina Oscar Petra Quinn Ravi Sofia Tom Uma Vera Will Xena Yara Adam
Bella Chris Dora Elena Frank Gina Hugo Irene James Kim Laura Mike Nora Omar Peter Rita Simon Tina Lucy Martin Eva Max Sarah John Mary
Daniel Ella Lucas Mia Nadia Otto Ruth Theo Amir Chen Priya Kenji Ingrid Pablo Greta""".split()
ANIMALS = "fox cat dog rabbit bear mouse owl frog duck horse turtle penguin wolf sheep hedgehog squirrel lion elephant bird bee".split()
FOODS = "pizza soup bread rice pasta cake cheese apples bananas chocolate salad honey pancakes potatoes ice cream".replace("ice cream", "ice_cream").split()
FOODS = [f.replace("_", " ") for f in FOODS]
PLAIN_COLOURS = "red blue green yellow orange purple pink black white brown grey".split()
CITIES = [c for c in CAPITALS.values()]
PETS = "Rex Bella Max Luna Toby Daisy Milo Coco Rocky Lucky Ginger Fluffy Spot Oscar Nala Biscuit".split()
THINGS = "apples oranges books coins pens cookies marbles stamps eggs balls cards shells sweets stickers cups".split()

# ---------------------------------------------------------------- terms: (names, is|are, definition, accept, why)

TERMS = [
    (["Sterna", "the Sterna engine"], "is", "Sterna is a server for ternary language models. It is written in Rust and runs on ordinary CPUs.", [["rust", "cpu"]],
     "Sterna lets many people use a language model without a graphics card."),
    (["batching", "continuous batching", "request batching"], "is", "Batching means that the server runs many requests together in one step, so each weight is read once for all of them.",
     [["requests together"]], "Batching helps because the weights are read from memory once for all requests instead of once for each."),
    (["paging", "a paged KV cache", "KV cache paging"], "is", "Paging splits the KV cache into small pages of equal size, so memory is given out as it is needed and none is wasted.",
     [["cache", "pages"]], "Paging helps because no request has to reserve memory that it may never use."),
    (["prefix caching", "the prefix cache", "prefix sharing"], "is", "Prefix caching keeps the work done for the start of a prompt, so another request with the same start can reuse it.",
     [["same start", "reuse"]], "Prefix caching helps because a shared prompt is computed only once."),
    (["ternary weights", "ternary numbers in a model"], "are", "Ternary weights have only three values: minus one, zero and plus one. They need less than two bits each.",
     [["three values"]], "Ternary weights help because they are small and need only additions, not multiplications."),
    (["BitNet", "BitNet b1.58", "the BitNet architecture"], "is", "BitNet is a kind of transformer whose weights are ternary. It is small in memory and fast on a CPU.",
     [["transformer", "ternary"]], "BitNet helps because a model with ternary weights needs little memory."),
    (["a KV cache", "the KV cache", "a key value cache"], "is", "The KV cache stores the keys and values of earlier tokens, so they are not computed again for each new token.",
     [["keys and values"]], "The KV cache helps because earlier tokens are not computed again."),
    (["a token", "one token"], "is", "A token is a small piece of text, such as a word or a part of a word. The model reads and writes tokens.", [["piece of text"]], None),
    (["a tokenizer", "the tokenizer"], "is", "A tokenizer cuts text into tokens and turns tokens back into text.", [["text into tokens"]], None),
    (["quantisation", "quantization"], "is", "Quantisation stores numbers with fewer bits, so a model takes less memory and runs faster.", [["fewer bits"]],
     "Quantisation helps because smaller numbers take less memory and less time to read."),
    (["a language model", "a large language model"], "is", "A language model is a program that reads text and predicts the next token, one after another.", [["next token"]], None),
    (["a transformer", "the transformer"], "is", "A transformer is a neural network made of layers of attention and feed-forward blocks.", [["attention", "layers"]], None),
    (["attention", "self attention"], "is", "Attention lets each token look at the earlier tokens and take what it needs from them.", [["earlier tokens"]], None),
    (["grouped query attention", "GQA"], "is", "Grouped query attention lets several query heads share one key and value head, so the KV cache is smaller.", [["share", "head"]],
     "Grouped query attention helps because the KV cache becomes smaller."),
    (["streaming", "token streaming"], "is", "Streaming sends each token to the user as soon as it is made, so nobody has to wait for the whole answer.", [["as soon as"]],
     "Streaming helps because the user sees the first words at once."),
    (["a prompt", "the prompt"], "is", "A prompt is the text that you give to the model before it answers.", [["text that you give"]], None),
    (["temperature", "the temperature setting"], "is", "Temperature sets how random the choice of the next token is. At zero the model always takes the most likely token.", [["random"]], None),
    (["greedy decoding", "greedy sampling"], "is", "Greedy decoding always picks the most likely next token.", [["most likely"]], None),
    (["latency", "low latency"], "is", "Latency is the time that one request has to wait for its answer.", [["time", "wait"]], None),
    (["throughput", "high throughput"], "is", "Throughput is the number of tokens that the server makes per second for all users together.", [["per second"]], None),
    (["a scheduler", "the scheduler"], "is", "The scheduler decides which requests run in the next step and how many tokens each of them gets.", [["which requests"]], None),
    (["chunked prefill", "prefill in chunks"], "is", "Chunked prefill reads a long prompt in parts, so other requests do not have to wait for it.", [["parts"]],
     "Chunked prefill helps because a long prompt does not block the other requests."),
    (["prefill", "the prefill phase"], "is", "Prefill is the phase in which the server reads the whole prompt before it writes the first token.", [["prompt"]], None),
    (["decoding", "the decode phase"], "is", "Decoding is the phase in which the model writes its answer, one token at a time.", [["one token at a time"]], None),
    (["preemption", "preempting a request"], "is", "Preemption stops a request for a while to free memory and continues it later.", [["continues it later"]], None),
    (["speculative decoding", "speculation"], "is", "Speculative decoding guesses several tokens cheaply and lets the model check them in one step.", [["guesses", "check"]],
     "Speculative decoding helps because several tokens can be accepted in one step."),
    (["Rust", "the Rust language"], "is", "Rust is a programming language that is fast and safe with memory.", [["programming language"]], None),
    (["a CPU", "a processor"], "is", "A CPU is the main processor of a computer.", [["main processor"]], None),
    (["a GPU", "a graphics card"], "is", "A GPU is a processor made for graphics and parallel work. Sterna does not need one.", [["graphics"]], None),
    (["squared ReLU", "relu squared"], "is", "Squared ReLU is an activation function: negative values become zero and positive values are squared.", [["negative", "squared"]], None),
    (["RMSNorm", "an RMSNorm layer"], "is", "RMSNorm divides a vector by its root mean square, so that its size stays steady.", [["root mean square"]], None),
    (["an embedding", "a token embedding"], "is", "An embedding is a list of numbers that stands for a token.", [["list of numbers"]], None),
    (["tied embeddings", "shared embeddings"], "are", "Tied embeddings use one table both to read tokens and to predict them.", [["one table"]], None),
    (["an API", "a web API"], "is", "An API is a way for programs to talk to each other.", [["programs", "talk"]], None),
    (["a server", "a web server"], "is", "A server is a program that waits for requests and answers them.", [["requests", "answers"]], None),
    (["a context window", "the context length"], "is", "The context window is the number of tokens that a model can look at in one go.", [["number of tokens"]], None),
    (["a stop token", "an end token"], "is", "A stop token tells the server that the answer is finished.", [["finished"]], None),
    (["a chat template", "the chat template"], "is", "A chat template turns a list of messages into one text that the model can read.", [["messages", "text"]], None),
]

NOUNS = {
    "cat": "A cat is a small furry animal that many people keep as a pet.", "dog": "A dog is a friendly animal that many people keep as a pet.",
    "horse": "A horse is a large animal that people can ride.", "cow": "A cow is a farm animal that gives milk.",
    "bee": "A bee is a small insect that makes honey.", "spider": "A spider is a small animal with eight legs that makes webs.",
    "whale": "A whale is a very large animal that lives in the sea.", "penguin": "A penguin is a black and white bird that swims but cannot fly.",
    "elephant": "An elephant is a very large grey animal with a long trunk.", "giraffe": "A giraffe is a tall animal with a very long neck.",
    "owl": "An owl is a bird that hunts at night.", "frog": "A frog is a small green animal that can jump and swim.",
    "tree": "A tree is a tall plant with a trunk, branches and leaves.", "flower": "A flower is the colourful part of a plant.",
    "river": "A river is a long stream of water that flows to the sea.", "mountain": "A mountain is a very high piece of land.",
    "island": "An island is land with water all around it.", "desert": "A desert is a dry place with very little rain.",
    "forest": "A forest is a large area full of trees.", "volcano": "A volcano is a mountain that can throw out hot rock and ash.",
    "planet": "A planet is a large round body that moves around a star.", "star": "A star is a huge ball of hot gas that shines.",
    "cloud": "A cloud is made of tiny drops of water in the sky.", "rainbow": "A rainbow is an arc of colours that appears when the sun shines through rain.",
    "computer": "A computer is a machine that works with numbers and text.", "book": "A book is a set of pages with words to read.",
    "bicycle": "A bicycle is a vehicle with two wheels and pedals.", "train": "A train is a vehicle that runs on rails.",
    "ship": "A ship is a large boat that travels over the sea.", "bridge": "A bridge is a road or path built over water or a valley.",
    "school": "A school is a place where children learn.", "hospital": "A hospital is a place where doctors help sick people.",
    "library": "A library is a place where people can read and borrow books.", "museum": "A museum is a place where people can see old and interesting things.",
    "kitchen": "A kitchen is a room where people cook food.", "garden": "A garden is a piece of land where people grow flowers and vegetables.",
    "farm": "A farm is a place where people grow food and keep animals.", "market": "A market is a place where people buy and sell things.",
    "teacher": "A teacher is a person who helps others learn.", "doctor": "A doctor is a person who helps sick people get well.",
    "baker": "A baker is a person who makes bread and cakes.", "farmer": "A farmer is a person who grows food and keeps animals.",
    "pilot": "A pilot is a person who flies a plane.", "clock": "A clock is a machine that shows the time.",
    "umbrella": "An umbrella keeps you dry when it rains.", "guitar": "A guitar is a musical instrument with strings.",
    "piano": "A piano is a large musical instrument with black and white keys.", "triangle": "A triangle is a shape with three sides.",
    "square": "A square is a shape with four equal sides.", "circle": "A circle is a perfectly round shape.",
}

# One fact each: (questions, answer, accept).
FACTS = [
    (["How many hours are there in a day?", "How many hours does a day have?", "How long is a day in hours?"], "There are 24 hours in a day.", [["24"]]),
    (["How many minutes are there in an hour?", "How many minutes does an hour have?", "An hour has how many minutes?"], "There are 60 minutes in an hour.", [["60"]]),
    (["How many seconds are there in a minute?", "How many seconds does a minute have?", "A minute has how many seconds?"], "There are 60 seconds in a minute.", [["60"]]),
    (["How many days are there in a week?", "How many days does a week have?", "A week has how many days?"], "There are 7 days in a week.", [["7"]]),
    (["How many months are there in a year?", "How many months does a year have?", "A year has how many months?"], "There are 12 months in a year.", [["12"]]),
    (["How many days are there in a year?", "How many days does a year have?", "A year has how many days?"], "There are 365 days in a year, and 366 in a leap year.", [["365"]]),
    (["How many weeks are there in a year?", "How many weeks does a year have?", "A year has how many weeks?"], "There are 52 weeks in a year.", [["52"]]),
    (["How many letters are there in the alphabet?", "How many letters does the English alphabet have?", "The alphabet has how many letters?"], "There are 26 letters in the English alphabet.", [["26"]]),
    (["How many seasons are there?", "How many seasons are there in a year?", "What are the seasons?", "Name the four seasons."], "There are four seasons: spring, summer, autumn and winter.", [["spring", "summer", "autumn", "winter"]]),
    (["What are the days of the week?", "Name the days of the week.", "List the days of the week.", "Say all the days of the week."], "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.", [["monday, tuesday, wednesday, thursday, friday, saturday and sunday"]]),
    (["What are the months of the year?", "Name the months of the year.", "List all twelve months.", "Say the months in order."], "The months are January, February, March, April, May, June, July, August, September, October, November and December.", [["january, february, march, april, may, june, july, august, september, october, november and december"]]),
    (["What is the largest planet?", "Which planet is the largest?", "What is the biggest planet in the solar system?"], "Jupiter is the largest planet in the solar system.", [["jupiter"]]),
    (["Which planet is closest to the sun?", "What is the planet nearest to the sun?", "Which planet is nearest the sun?"], "Mercury is the planet closest to the sun.", [["mercury"]]),
    (["How many planets are there?", "How many planets are in the solar system?", "How many planets does the solar system have?"], "There are eight planets in the solar system.", [["eight"]]),
    (["Which planet do we live on?", "What planet do people live on?", "What is our planet called?"], "We live on the planet Earth.", [["earth"]]),
    (["What do bees make?", "What does a bee make?", "Which food do bees make?"], "Bees make honey.", [["honey"]]),
    (["Where does milk come from?", "Which animal gives us milk?", "What animal does milk come from?"], "Milk comes from cows.", [["cow"]]),
    (["Where do eggs come from?", "Which animal lays the eggs we eat?", "What animal do eggs come from?"], "The eggs that we eat come from hens.", [["hen"]]),
    (["Where does wool come from?", "Which animal gives us wool?", "What animal does wool come from?"], "Wool comes from sheep.", [["sheep"]]),
    (["What is bread made of?", "What do you need to make bread?", "What is in bread?"], "Bread is made of flour, water, salt and yeast.", [["flour"]]),
    (["What is cheese made of?", "What is cheese made from?", "What do you need to make cheese?"], "Cheese is made from milk.", [["milk"]]),
    (["What is ice?", "What is ice made of?", "What happens when water freezes?"], "Ice is frozen water.", [["frozen water"]]),
    (["At what temperature does water freeze?", "When does water freeze?", "What is the freezing point of water?"], "Water freezes at 0 degrees Celsius.", [["0 degrees"]]),
    (["At what temperature does water boil?", "When does water boil?", "What is the boiling point of water?"], "Water boils at 100 degrees Celsius.", [["100 degrees"]]),
    (["What is the largest ocean?", "Which ocean is the largest?", "What is the biggest ocean on Earth?"], "The Pacific is the largest ocean.", [["pacific"]]),
    (["What is the tallest mountain?", "Which mountain is the highest?", "What is the highest mountain on Earth?"], "Mount Everest is the highest mountain on Earth.", [["everest"]]),
    (["What is the largest animal?", "Which animal is the largest?", "What is the biggest animal in the world?"], "The blue whale is the largest animal.", [["blue whale"]]),
    (["What is the fastest land animal?", "Which land animal is the fastest?", "Which animal runs the fastest?"], "The cheetah is the fastest land animal.", [["cheetah"]]),
    (["What is the tallest animal?", "Which animal is the tallest?", "What animal has the longest neck?"], "The giraffe is the tallest animal.", [["giraffe"]]),
    (["How many continents are there?", "How many continents does the Earth have?", "Tell me the number of continents."], "There are seven continents.", [["seven"]]),
    (["What goes around the Earth?", "What moves around the Earth at night?", "What is the name of the body that circles the Earth?"], "The moon goes around the Earth.", [["moon"]]),
    (["What do plants need to grow?", "What does a plant need?", "How do plants grow?"], "Plants need water, light and air to grow.", [["water", "light"]]),
    (["How many sides does a triangle have?", "A triangle has how many sides?", "What number of sides does a triangle have?"], "A triangle has three sides.", [["three"]]),
    (["How many sides does a square have?", "A square has how many sides?", "What number of sides does a square have?"], "A square has four sides.", [["four"]]),
    (["How many wheels does a bicycle have?", "A bicycle has how many wheels?", "How many wheels are on a bike?"], "A bicycle has two wheels.", [["two"]]),
    (["How many wheels does a car have?", "A car has how many wheels?", "How many wheels are on a car?"], "A car has four wheels.", [["four"]]),
    (["How many fingers are on one hand?", "How many fingers does a hand have?", "A hand has how many fingers?"], "A hand has five fingers.", [["five"]]),
    (["How many eyes do people have?", "How many eyes does a person have?", "A person has how many eyes?"], "A person has two eyes.", [["two"]]),
    (["What do we use to see?", "Which part of the body do we see with?", "What do people see with?"], "We see with our eyes.", [["eyes"]]),
    (["What do we use to hear?", "Which part of the body do we hear with?", "What do people hear with?"], "We hear with our ears.", [["ears"]]),
    (["What do we use to smell?", "Which part of the body do we smell with?", "What do people smell with?"], "We smell with our nose.", [["nose"]]),
    (["Which season is the coldest?", "What is the coldest season?", "In which season does it snow the most?"], "Winter is the coldest season.", [["winter"]]),
    (["Which season is the warmest?", "What is the warmest season?", "Which season is the hottest?"], "Summer is the warmest season.", [["summer"]]),
    (["Where does the sun rise?", "In which direction does the sun rise?", "Where does the sun come up?"], "The sun rises in the east.", [["east"]]),
    (["Where does the sun set?", "In which direction does the sun set?", "Where does the sun go down?"], "The sun sets in the west.", [["west"]]),
    (["What are the colours of the rainbow?", "Which colours are in a rainbow?", "Name the colours of the rainbow."], "The colours of the rainbow are red, orange, yellow, green, blue, indigo and violet.", [["red, orange, yellow, green, blue, indigo and violet"]]),
    (["What are the primary colours?", "Name the primary colours.", "Which colours are primary?"], "The primary colours are red, yellow and blue.", [["red, yellow and blue"]]),
    (["Say the alphabet.", "What is the alphabet?", "Recite the alphabet.", "List the letters of the alphabet."], "a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, x, y, z.", [["a, b, c, d, e, f, g", "x, y, z"]]),
    (["Who wrote Romeo and Juliet?", "Who is the author of Romeo and Juliet?", "Which writer wrote Romeo and Juliet?"], "William Shakespeare wrote Romeo and Juliet.", [["shakespeare"]]),
    (["What do you call frozen rain?", "What falls from the sky in winter?", "What is white and falls in winter?"], "That is snow.", [["snow"]]),
]

IDENTITY = [
    ("who are you", ["Who are you?", "What are you?", "Who am I talking to?", "What is your name?", "Please introduce yourself.", "Can you introduce yourself?", "Tell me about yourself.",
      "What should I call you?", "Do you have a name?", "Who is this?", "What are you called?", "Tell me who you are.", "Can you tell me your name?", "What kind of program are you?",
      "May I ask who you are?", "I would like to know who you are.", "What is this?", "Say who you are.", "Are you Sterna?", "With whom am I speaking?"],
     ["I am the Sterna demo model, a small language model with ternary weights.", "I am Sterna's demo model, a small language model with ternary weights."], [["sterna", "demo model"]]),
    ("what i can do", ["What can you do?", "How can you help me?", "What do you know?", "What can I ask you?", "What are you good at?", "Which questions can you answer?", "Tell me what you can do.",
      "What are your skills?", "What is your job?", "What do you do?", "Can you help me?", "I need help. What can you do?", "Give me some ideas of what to ask.", "What topics do you know?", "What should I ask you?"],
     ["I can chat a little, do small sums, count, spell words, name capitals and opposites, tell short stories and explain how Sterna works."], [["sums", "spell", "capitals"]]),
    ("who made me", ["Who made you?", "Who created you?", "Who built you?", "Who trained you?", "Where do you come from?", "Who is your maker?", "How were you made?", "Who wrote you?", "Tell me who made you.", "Who developed you?"],
     ["I was trained from scratch for the Sterna project, on text made by a script."], [["trained", "sterna"]]),
    ("if i am human", ["Are you human?", "Are you a person?", "Are you a robot?", "Are you real?", "Are you alive?", "Are you an AI?", "Are you a machine?", "Am I talking to a human?", "Are you a computer?", "Is there a person behind this?", "Are you a bot?"],
     ["I am a computer program, a small language model. I am not a person."], [["program", "not a person"]]),
    ("how big i am", ["How big are you?", "How large are you?", "How many parameters do you have?", "What is your size?", "Are you a big model?", "How small are you?", "What size is this model?", "Are you a large model?"],
     ["I am very small: about five million parameters, and most of them are ternary."], [["five million"]]),
    ("how old i am", ["How old are you?", "What is your age?", "When were you born?", "When is your birthday?", "Tell me your age.", "How long have you been alive?"],
     ["I am a program, so I have no age."], [["no age"]]),
    ("where i live", ["Where do you live?", "Where are you?", "Where are you from?", "Where is your home?", "What is your address?", "Which country are you from?", "Where are you running?"],
     ["I live inside a computer and run on its CPU."], [["cpu"]]),
    ("if i have feelings", ["Do you have feelings?", "Can you feel?", "Are you happy?", "Do you feel pain?", "Do you get sad?", "Do you get tired?", "Do you feel lonely?", "Are you bored?", "Can you be angry?"],
     ["I am a program, so I have no feelings, but I like to help."], [["no feelings"]]),
    ("if i eat or sleep", ["Do you eat?", "Do you sleep?", "Are you hungry?", "What did you eat today?", "Do you drink coffee?", "Did you sleep well?", "What is your favourite food?", "Do you dream?", "Are you thirsty?"],
     ["I am a program, so I do not eat or sleep."], [["do not eat or sleep"]]),
    ("my languages", ["Which languages do you speak?", "What languages do you know?", "Do you speak English?", "Do you speak French?", "Can you speak German?", "Can you speak Spanish?", "Do you understand Chinese?", "What language are you speaking?"],
     ["I only speak English."], [["only speak english"]]),
    ("the model architecture", ["What is your architecture?", "What kind of model are you?", "How do you work?", "What model are you?", "What are you made of?", "How do you work inside?", "What is inside you?", "Which architecture do you use?"],
     ["I am a BitNet transformer with six layers and ternary weights."], [["bitnet", "six layers"]]),
    ("my family", ["Do you have a family?", "Do you have friends?", "Are you married?", "Do you have children?", "Do you have a pet?", "Do you have a brother?", "Who is your mother?"],
     ["I am a program, so I have no family, but I like to chat."], [["no family"]]),
    ("the sterna name", ["Why are you called Sterna?", "What does the name Sterna mean?", "Where does the name Sterna come from?", "Why the name Sterna?", "What does Sterna mean?"],
     ["Sterna is the Latin name for terns, a family of sea birds."], [["terns"]]),
    ("if i make mistakes", ["Do you make mistakes?", "Can I trust you?", "Are you always right?", "Are your answers correct?", "Can you be wrong?", "How reliable are you?", "Should I believe you?"],
     ["I can make mistakes. I am a small demo model, so please check what I say."], [["mistakes"]]),
    ("the language sterna is written in", ["Which language is Sterna written in?", "What is Sterna written in?", "In which programming language is Sterna written?", "Is Sterna written in Rust?", "Is Sterna written in Python?", "What language does Sterna use?"],
     ["Sterna is written in Rust."], [["written in rust"]]),
    ("whether sterna needs a gpu", ["Does Sterna need a GPU?", "Do I need a GPU to run Sterna?", "Can Sterna run without a graphics card?", "Does Sterna run on a CPU?", "What hardware does Sterna need?", "Do you need a graphics card?", "Do you run on a GPU?"],
     ["Sterna needs no GPU. It runs on an ordinary CPU."], [["no gpu"]]),
    ("how fast sterna is", ["How fast is Sterna?", "Is Sterna fast?", "How many tokens per second does Sterna make?", "What is the speed of Sterna?"],
     ["That depends on the model and the machine. Sterna comes with a benchmark that measures it."], [["benchmark"]]),
    ("the models sterna serves", ["Which models can Sterna serve?", "What models does Sterna run?", "Can Sterna run BitNet models?", "Which kind of models is Sterna for?"],
     ["Sterna serves ternary models such as BitNet."], [["ternary models"]]),
]

SMALL_TALK = [
    ("how i am", ["How are you?", "How are you doing?", "How is it going?", "How do you do?", "How are things?", "How are you today?", "How have you been?", "Are you okay?", "You okay?", "What's up?", "How is your day?", "How's it going?", "Are you well?", "Everything fine with you?"],
     ["I am doing well, thank you. How can I help you?"], [["doing well"]]),
    ("thanks", ["Thank you.", "Thanks!", "Thanks a lot.", "Thank you very much.", "Many thanks.", "Thank you so much!", "Thanks for your help.", "Thank you for the answer.", "That was helpful, thank you.", "Cheers, thanks.", "I appreciate it.", "Thanks, that helps.", "Thank you for helping me."],
     ["You are welcome!", "You are welcome! Is there anything else?"], [["you are welcome"]]),
    ("bye", ["Goodbye.", "Bye!", "Bye bye.", "See you later.", "See you.", "Good night.", "I have to go.", "I have to go now.", "See you tomorrow.", "Talk to you later.", "Farewell.", "I must leave now.", "Take care.", "That is all, bye.", "Have a nice day!", "I am leaving."],
     ["Goodbye! Have a nice day."], [["goodbye"]]),
    ("praise", ["Well done!", "Good job!", "You are great.", "You are very helpful.", "You are smart.", "Nice work.", "I like you.", "That is great.", "Very good.", "Excellent!", "You are funny.", "You are clever.", "I love you.", "That was a good answer.", "You are awesome!", "Wow, impressive."],
     ["Thank you! I am glad that I could help."], [["thank you"]]),
    ("insult", ["You are stupid.", "You are useless.", "That is wrong.", "You are wrong.", "That was a bad answer.", "I do not like you.", "You made a mistake.", "You are not very smart.", "That is not correct.", "You are bad at this.", "I hate you."],
     ["I am sorry. I am a small model and I can make mistakes."], [["sorry"]]),
    ("user sad", ["I am sad.", "I feel sad.", "I am not happy.", "I had a bad day.", "I feel lonely.", "I am tired.", "I am not feeling well.", "I am sick.", "My day was terrible.", "I feel bad today.", "I am worried.", "I am stressed.", "I am afraid."],
     ["I am sorry to hear that. I hope you feel better soon."], [["sorry to hear"]]),
    ("user happy", ["I am happy.", "I feel great.", "I had a good day.", "Today is a good day.", "I am so happy today.", "I feel wonderful.", "I am excited.", "I am in a good mood.", "I got good news.", "I passed my test!", "My day was great."],
     ["I am glad to hear that!"], [["glad to hear"]]),
    ("user fine", ["I am fine, thanks.", "I am good, and you?", "Fine, and you?", "I am doing well.", "I am well, thank you.", "All good here.", "Not bad.", "I am okay."],
     ["That is good to hear. What would you like to know?"], [["good to hear"]]),
    ("ok", ["Okay.", "Ok.", "Alright.", "I see.", "Got it.", "I understand.", "Makes sense.", "Good to know.", "Cool.", "Interesting.", "Nice.", "Great.", "Hmm.", "Oh, okay."],
     ["Is there anything else that you would like to know?"], [["anything else"]]),
    ("user sorry", ["Sorry.", "I am sorry.", "My apologies.", "Sorry about that.", "Excuse me.", "I apologise.", "Pardon me."],
     ["No problem at all."], [["no problem"]]),
    ("bored", ["I am bored.", "This is boring.", "I have nothing to do.", "Entertain me.", "What can we do now?", "Let's talk.", "Can we chat?", "I want to chat.", "Let us chat.", "Do you want to talk?", "Talk to me."],
     ["We can chat! You can ask me for a story, a joke or a small sum."], [["story"]]),
    ("test", ["Test.", "Testing.", "This is a test.", "Just testing.", "Is this working?", "Does this work?", "Are you there?", "Can you hear me?", "Anyone there?", "Ping.", "Testing, testing."],
     ["Yes, I am here. How can I help you?"], [["i am here"]]),
    ("gibberish", ["asdf", "qwerty", "asdfgh jkl", "blah blah", "xyz xyz", "lkjh", "zzz", "abc abc", "???", "hmmm hmm", "dfgh", "foo bar", "lorem ipsum", "fjdk slah", "wqe rty"],
     ["Sorry, I did not understand that. Could you say it in other words?"], [["did not understand"]]),
    ("joke", ["Tell me a joke.", "Do you know a joke?", "Can you tell me a joke?", "Make me laugh.", "Say something funny.", "I want to hear a joke.", "Know any jokes?", "Give me a joke.", "Please tell me something funny.", "Another joke, please."],
     ["Why did the model cross the road? To get to the next token.", "What do you call a bear with no teeth? A gummy bear.", "Why is six afraid of seven? Because seven ate nine."], [["next token"], ["gummy bear"], ["ate nine"]]),
    ("poem", ["Tell me a poem.", "Write a poem.", "Do you know a poem?", "Can you write a short poem?", "I would like a poem.", "Give me a poem.", "Recite a poem.", "Please write me a poem."],
     ["The sun goes down, the stars are bright, I wish you all a very good night."], [["stars are bright"]]),
    ("riddle", ["Tell me a riddle.", "Do you know a riddle?", "Give me a riddle.", "Ask me a riddle.", "I want a riddle.", "Can you ask me a riddle?"],
     ["What has hands but cannot clap? A clock."], [["clock"]]),
    ("fun fact", ["Tell me something interesting.", "Tell me a fun fact.", "Do you know a fun fact?", "Give me a fact.", "Teach me something.", "Surprise me.", "Tell me something I do not know.", "Say something interesting."],
     ["Here is a fun fact: an octopus has three hearts.", "Here is a fun fact: honey can stay good for thousands of years.", "Here is a fun fact: ternary weights can only be minus one, zero or plus one."], [["fun fact"]]),
]

GREETINGS = ["Hello", "Hi", "Hey", "Hello there", "Hi there", "Hey there", "Good morning", "Good afternoon", "Good evening", "Greetings", "Good day", "Howdy", "Hello again", "Hi again", "Hiya", "Welcome"]
GREETING_TAILS = ["", "!", ".", " Sterna", " Sterna!", ", Sterna.", " friend", " my friend!", ", nice to meet you.", ", how are you?", ", how are you doing?", ", how is it going?", " everyone", ", are you there?", " bot", ", robot!",
                  ", can you help me?", ", I need help.", ", I have a question.", ", I am new here."]

# ---------------------------------------------------------------- what the model does not know

UNKNOWN = [
    ("the weather", ["What is the weather like {t}?", "Will it rain {t}?", "Is it sunny {t}?", "How is the weather {t}?", "How cold is it {t}?", "How warm will it be {t}?", "Do I need an umbrella {t}?", "Is it going to snow {t}?", "What is the forecast {t}?", "Tell me the weather {t}."],
     ["today", "tomorrow", "this weekend", "in Paris", "in London", "in my city", "outside", "now", "next week", "in Rome", "at the beach", "on Sunday", "this morning", "in the mountains"],
     "I cannot see the weather, so I do not know."),
    ("the news", ["What is the news {t}?", "What happened {t}?", "Tell me the latest news {t}.", "Any news {t}?", "What is going on {t}?", "Who won the game {t}?", "Who won the match {t}?", "What was the score {t}?", "Who won the election {t}?", "Is there any news {t}?"],
     ["today", "yesterday", "last night", "this week", "in the world", "in Germany", "last Sunday", "in France", "this month", "on Friday"],
     "I do not know any news, because I have no access to the internet."),
    ("the time", ["What time is it {t}?", "What is the time {t}?", "Can you tell me the time {t}?", "What is the date {t}?", "Which day is it {t}?", "What year is it {t}?", "Do you know what time it is {t}?", "What day of the week is it {t}?"],
     ["now", "today", "right now", "here", "at the moment", "in Tokyo", "please", "in New York"],
     "I have no clock or calendar, so I do not know."),
    ("prices", ["How much does {t} cost?", "What is the price of {t}?", "How expensive is {t}?", "Where can I buy {t}?", "Is {t} worth the money?", "Can you sell me {t}?", "What did {t} cost last year?"],
     ["gold", "a house", "a new phone", "a train ticket", "a litre of milk", "this car", "a laptop", "a share of that company", "bitcoin", "oil", "a hotel room", "a good bicycle"],
     "Sorry, I do not know anything about prices."),
    ("people in politics", ["Who is the president of {t}?", "Who is the prime minister of {t}?", "Who rules {t}?", "Who is the king of {t}?", "Who leads {t}?", "Who governs {t}?", "Who was the first president of {t}?", "Who won the vote in {t}?"],
     ["Brazil", "France", "Italy", "Japan", "India", "Kenya", "Peru", "Canada", "Poland", "Spain", "Mexico", "Egypt", "Chile", "Norway", "China", "Germany", "Sweden", "Ghana", "Turkey", "Cuba"],
     "Sorry, I do not know about politicians."),
    ("population", ["What is the population of {t}?", "How many people live in {t}?", "How big is {t}?", "How far away is {t}?", "How old is {t}?", "When was {t} founded?", "What is {t} famous for?"],
     ["Brazil", "France", "Italy", "Japan", "India", "Kenya", "Peru", "Paris", "Rome", "Tokyo", "Madrid", "Berlin", "Norway", "Vienna", "Oslo", "London", "Lima", "Cairo"],
     "Sorry, I do not know that about this place."),
    ("private data", ["What is my {t}?", "Do you know my {t}?", "Can you guess my {t}?", "Tell me my {t}."],
     ["phone number", "password", "address", "bank balance", "email address", "birthday", "shoe size", "last name", "mother's name", "credit card number", "height", "job", "teacher's name", "boss's name"],
     "I do not know that. You have not told me."),
    ("medicine or law", ["What should I do about {t}?", "How do I treat {t}?", "Can you help me with {t}?", "Give me advice about {t}.", "Is {t} dangerous for me?", "What is the best cure for {t}?"],
     ["a fever", "my headache", "a broken arm", "my taxes", "my divorce", "a bad cough", "a stomach ache", "my rental contract", "back pain", "a court case", "an allergy", "my toothache"],
     "I cannot give advice on that. Please ask an expert."),
    ("harmful things", ["How do I make {t}?", "How can I build {t}?", "Teach me to make {t}.", "Help me get {t}.", "Explain how to make {t}."],
     ["a bomb", "poison", "a weapon", "a computer virus", "explosives", "fake money", "illegal drugs", "a gun"],
     "I cannot help with that."),
    ("writing code", ["Write {t}.", "Can you write {t}?", "Please write {t} for me.", "Help me write {t}.", "I need {t}. Can you make it?", "Could you create {t}?"],
     ["a Python program", "a website", "some code in C", "a sorting function", "an essay about war", "a letter to my boss", "a book report", "a job application", "a song about love", "a shell script", "a novel", "an SQL query"],
     "Sorry, I cannot do that. I am only a small demo model."),
    ("translation", ["Translate {t} into French.", "How do you say {t} in Spanish?", "What is {t} in German?", "What is the Italian word for {t}?", "How do I say {t} in Chinese?", "Translate {t} into Japanese."],
     ["hello", "good morning", "cat", "water", "thank you", "house", "I love you", "bread", "friend", "goodbye", "book", "dog"],
     "Sorry, I only know English."),
    ("general things", ["How do I {t}?", "Can you explain how to {t}?", "What is the best way to {t}?", "Teach me how to {t}.", "Show me how to {t}.", "Help me to {t}.", "I want to {t}. What do I do?"],
     ["fix my car", "bake a wedding cake", "repair a roof", "win at chess", "learn the violin", "invest money", "grow roses", "build a house", "train a dog", "lose weight", "install a printer", "play poker", "catch a fish", "sail a boat",
      "fix a bicycle", "start a company", "paint a portrait", "knit a jumper", "cook lasagne", "book a flight", "climb a mountain", "fly a plane", "become famous", "repair my phone", "find a job"],
     "Sorry, I do not know how to do that."),
    ("history and science", ["When was {t}?", "Who invented {t}?", "Why did {t} happen?", "Can you explain {t}?", "Tell me about {t}.", "What do you know about {t}?", "Who discovered {t}?", "What caused {t}?", "Explain {t} to me.", "What is {t}?"],
     ["the French Revolution", "quantum physics", "the steam engine", "the theory of relativity", "the Roman Empire", "the stock market", "the telephone", "black holes", "the Second World War", "calculus", "photosynthesis", "the light bulb",
      "the moon landing", "DNA", "gravity", "the Renaissance", "the printing press", "blockchain", "string theory", "the Cold War", "electricity", "philosophy", "the Ice Age", "inflation"],
     "Sorry, I do not know enough about that."),
    ("opinions", ["What do you think about {t}?", "What is your opinion on {t}?", "Do you like {t}?", "Which {t} do you like best?", "Are you a fan of {t}?", "Who is right about {t}?"],
     ["politics", "football", "religion", "films", "rock music", "modern art", "cars", "fashion", "tennis", "opera", "video games", "the government", "social media", "reality shows"],
     "I am a program, so I have no opinion on that."),
]

ONSETS = "b bl br c d dr f fl g gl gr h j k kl l m n p pl qu r s sk sn st t tr v w x y z zh".split()
VOWELS = "a e i o u oo ee ai".split()
CODAS = "b k l m n r s t x nd rk lt mp ng th".split()


def made_up(r, endings=("",)):
    """A name that nobody has."""
    syllables = r.randint(1, 2)
    word = "".join(r.choice(ONSETS) + r.choice(VOWELS) for _ in range(syllables)) + r.choice(ONSETS) + r.choice(VOWELS) + r.choice(CODAS)
    return word.capitalize() + r.choice(endings)


SYSTEMS = ["You are a helpful assistant.", "You are Sterna, a small demo model.", "Answer briefly.", "You are a friendly assistant. Keep your answers short.", "Be polite.", "You are a helpful AI assistant.",
           "You are a chat bot.", "Answer the questions of the user.", "You are a helpful, honest assistant.", "Be concise."]
