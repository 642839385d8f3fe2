"""Programs, and what is true of their objects and values in Python."""

from __future__ import annotations

VECTOR = """
class Vector:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, o): return Vector(self.x + o.x, self.y + o.y)
    def __radd__(self, o): return self if o == 0 else NotImplemented
    def __iadd__(self, o): self.x += o.x; self.y += o.y; return self
    def __sub__(self, o): return Vector(self.x - o.x, self.y - o.y)
    def __mul__(self, k): return Vector(self.x * k, self.y * k)
    __rmul__ = __mul__
    def __matmul__(self, o): return self.x * o.x + self.y * o.y
    def __truediv__(self, k): return Vector(self.x / k, self.y / k)
    def __neg__(self): return Vector(-self.x, -self.y)
    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5
    def __bool__(self): return bool(self.x or self.y)
    def __eq__(self, o): return (self.x, self.y) == ((o.x, o.y) if isinstance(o, Vector) else o)
    def __lt__(self, o): return abs(self) < abs(o)
    def __hash__(self): return hash((self.x, self.y))
    def __iter__(self): return iter((self.x, self.y))
    def __len__(self): return 2
    def __getitem__(self, i): return (self.x, self.y)[i]
    def __contains__(self, v): return v in (self.x, self.y)
    def __call__(self, k=1): return self.x * k
    def __repr__(self): return f"Vector({self.x}, {self.y})"
    def __format__(self, spec): return f"<{self.x:{spec}}|{self.y:{spec}}>"
    def __round__(self, n=0): return Vector(round(self.x, n), round(self.y, n))
    def __int__(self): return int(self.x)
    def __float__(self): return float(self.x)
    def __index__(self): return int(self.x)
    def __reversed__(self): return iter((self.y, self.x))
    def __getattr__(self, name):
        if name == "z": return 0
        raise AttributeError(name)
"""
OPERATORS = [
    line
    for line in r"""
v + w == Vector(4, 6)
v - w == Vector(2, 2)
v * 2 == Vector(6, 8)
2 * v == Vector(6, 8)
v @ w == 11
v / 2 == Vector(1.5, 2)
-v == Vector(-3, -4)
abs(v) == 5
abs(Vector(3, 4) * 2) == 10
bool(v) and not Vector(0, 0)
v != w
not v == w
Vector(3, 4) == (3, 4)
w < v
v > w
sorted([v, w])[0] is w
sorted([v, w], reverse=True) == [v, w]
max(v, w) == v
min([v, w], key=abs) is w
sum([Vector(1, 1), Vector(2, 2)]) == Vector(3, 3)
hash(v) == hash(Vector(3, 4))
len({v, Vector(3, 4), w}) == 2
{v: 1}[Vector(3, 4)] == 1
Vector(3, 4) in [v, w]
[v, w].index(Vector(1, 2)) == 1
list(v) == [3, 4]
tuple(v) == (3, 4)
len(v) == 2
v[0] == 3 and v[-1] == 4 and v[0:2] == (3, 4)
4 in Vector(3, 4)
5 not in Vector(3, 4)
v() == 3 and v(2) == 6 and v(k=3) == 9
repr(v) == str(v) == 'Vector(3, 4)'
f'{v:.1f}' == '<3.0|4.0>'
f'{v!r}' == 'Vector(3, 4)'
'%s' % v == 'Vector(3, 4)'
'{}'.format([v]) == '[Vector(3, 4)]'
round(Vector(1.26, 2), 1) == Vector(1.3, 2)
int(v) == 3 and float(v) == 3.0 and [9, 8, 7, 6][v] == 6
list(reversed(v)) == [4, 3]
hasattr(v, 'x') and hasattr(v, 'z') and not hasattr(v, 'a')
getattr(v, 'a', 7) == 7
isinstance(v, Vector) and isinstance(v + w, Vector) and not isinstance(3, Vector)
type(v) is Vector and type(v).__name__ == 'Vector'
v.__class__ is Vector
v.__class__.__name__ == 'Vector' and Vector.__name__ == 'Vector'
v.__dict__['x'] == 3
vars(v) == {'x': 3, 'y': 4}
callable(v) and callable(Vector)
v.__len__() == 2
[*v, *w] == [3, 4, 1, 2]
(lambda a, b: a + b)(*v) == 7
dict([v]) == {3: 4}
list(map(abs, [v])) == [5.0]
list(zip(v, w)) == [(3, 1), (4, 2)]
any(v) and all(v)
isinstance(v, collections.abc.Iterable) and isinstance(v, collections.abc.Hashable)
not isinstance(v, collections.abc.Mapping)
copy.copy(v) == v and copy.copy(v) is not v
copy.deepcopy([v])[0] == v
[x for x in v if x > 3] == [4]
v is v and v is not w
""".splitlines()
    if line
]
CONTAINERS = """
import array, collections, dataclasses, datetime, decimal, enum, fractions, functools, uuid, typing
Point = collections.namedtuple("Point", "x count")
class Typed(typing.NamedTuple):
    a: int
    b: str = "z"
    def both(self): return f"{self.a}{self.b}"
@dataclasses.dataclass(order=True)
class Item:
    name: str
    price: float = 1.0
    tags: list = dataclasses.field(default_factory=list)
@dataclasses.dataclass(frozen=True)
class Fixed:
    a: int
class Colour(enum.Enum):
    RED = 1
    BLUE = 2
class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2
class Word(str, enum.Enum):
    YES = "yes"
class Bits(enum.Flag):
    A = 1
    B = 2
class Stack(list):
    def push(self, x): self.append(x)
    def top(self): return self[-1]
class Bag(dict):
    def __missing__(self, key): return 0
class Title(str):
    def shout(self): return self.upper() + "!"
class Metres(float):
    def __add__(self, o): return Metres(float(self) + float(o))
class Box:
    def __init__(self): self.items, self._name, self._peer, self.__x = [], "n", 1, 2
    @property
    def size(self): return len(self.items)
    @classmethod
    def make(cls): return cls()
    @staticmethod
    def two(): return 2
    SHARED = [1]
def counter(text): return collections.Counter(text)
def groups(xs):
    found = collections.defaultdict(list)
    for x in xs: found[len(x)].append(x)
    return found
def ordered(): return collections.OrderedDict(a=1, b=2)
def queue(): return collections.deque([1, 2], maxlen=None)
def values(): return [2j, range(3), b"a", bytearray(b"b"), frozenset({1}), array.array("i", [1])]
def exact(): return decimal.Decimal("1.1"), fractions.Fraction(1, 3), datetime.timedelta(days=1)
def day(): return datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc)
def views(): return {"a": 1}.keys(), {"a": 1}.values(), {"a": 1}.items()
def nested(): return {"a": [{"b": (1, [2])}]}
def ident(): return uuid.UUID(int=5)
def cut(): return slice(1, 2)
@functools.lru_cache
def cached(n): return n
"""
VALUES = [
    line
    for line in r"""
counter('aab') == {'a': 2, 'b': 1} and counter('a')['z'] == 0
counter('aab').most_common(1) == [('a', 2)] and isinstance(counter(''), collections.Counter)
counter('aab') + counter('b') == collections.Counter(a=2, b=2)
groups(['a', 'bb']) == {1: ['a'], 2: ['bb']} and groups([])[5] == []
isinstance(groups([]), collections.defaultdict) and groups([]).default_factory is list
list(ordered()) == ['a', 'b'] and ordered() == collections.OrderedDict(a=1, b=2)
ordered() != collections.OrderedDict([('b', 2), ('a', 1)])
isinstance(queue(), collections.deque) and queue().popleft() == 1
Point(1, 2).x == 1 and Point(1, 2).count == 2 and Point(1, 2) == (1, 2)
Point(1, 2)._asdict() == {'x': 1, 'count': 2} and Point._fields == ('x', 'count')
Point(1, 2)._replace(x=5) == Point(5, 2) and isinstance(Point(1, 2), tuple)
repr(Point(1, 2)) == 'Point(x=1, count=2)' and Point(x=1, count=2)[0] == 1
Typed(1).both() == '1z' and Typed(1) == (1, 'z') and hash(Typed(1)) == hash((1, 'z'))
(lambda a, b: a)(*Typed(3)) == 3
Typed(1) < Typed(2) and sorted([Typed(2), Typed(1)])[0].a == 1
Item('a') == Item('a', 1.0, []) and Item('a') < Item('b') and Item('a') != Item('b')
repr(Item('a')) == "Item(name='a', price=1.0, tags=[])" and Item('a').tags == []
hash(Fixed(1)) == hash(Fixed(1)) and {Fixed(1): 2}[Fixed(1)] == 2
Colour.RED is Colour.RED and Colour.RED == Colour(1) and Colour['BLUE'].value == 2
[c.name for c in Colour] == ['RED', 'BLUE'] and len(Colour) == 2 and Colour.RED in Colour
Colour.RED != Colour.BLUE and Colour.RED != 1 and str(Colour.RED) == 'Colour.RED'
{Colour.RED: 1}[Colour(1)] == 1 and isinstance(Colour.RED, Colour)
Level.LOW < Level.HIGH and Level.LOW == 1 and Level.HIGH.name == 'HIGH' and Level.LOW + 1 == 2
Word.YES == 'yes' and Word.YES.value == 'yes' and Word('yes') is Word.YES
(Bits.A | Bits.B).value == 3 and Bits.A in (Bits.A | Bits.B)
Stack([1, 2]).top() == 2 and Stack([1]) == [1] and [1] == Stack([1]) and len(Stack()) == 0
isinstance(Stack(), list) and list(Stack([1])) == [1] and Stack([1, 2])[0] == 1 and not Stack()
Bag(a=1)['z'] == 0 and Bag(a=1) == {'a': 1} and 'a' in Bag(a=1) and list(Bag(a=1)) == ['a']
Title('a').shout() == 'A!' and Title('a') == 'a' and 'x'.join([Title('a'), 'b']) == 'axb'
Metres(1) + 2 == 3.0 and isinstance(Metres(1), float) and isinstance(Metres(1) + 1, Metres)
Box()._name == 'n' and Box()._peer == 1 and Box()._Box__x == 2 and Box().size == 0
Box.make().size == 0 and Box.two() == 2 and Box.SHARED == [1] and Box().SHARED == [1]
values() == [2j, range(3), b'a', bytearray(b'b'), {1}, array.array('i', [1])]
exact() == (decimal.Decimal('1.1'), fractions.Fraction(1, 3), datetime.timedelta(1))
day() == datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc) and day().year == 2020
views()[0] == {'a'} and list(views()[1]) == [1] and views()[2] == {('a', 1)}
nested() == {'a': [{'b': (1, [2])}]} and nested()['a'][0]['b'][1][0] == 2
ident() == uuid.UUID(int=5) and cut() == slice(1, 2)
cached(3) == 3 and cached(3) == 3 and cached.cache_info().hits >= 1
cached.__name__ == 'cached' and Box.two.__name__ == 'two'
""".splitlines()
    if line
]
