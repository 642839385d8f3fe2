"""A program, and tests of it that hold in Python: errors, contexts, coroutines, containers."""

from __future__ import annotations

FUNCTIONS = """
import asyncio, contextlib, functools, json
class AppError(Exception):
    def __init__(self, message, code=5):
        super().__init__(message)
        self.code = code
class Missing(AppError, KeyError): pass
class Short(ValueError): pass
def fail(kind=None):
    if kind == "missing": raise Missing("gone", 404)
    if kind == "short": raise Short("too short")
    if kind == "json": json.loads("{")
    if kind == "key": {}["k"]
    if kind == "cause":
        try: 1 / 0
        except ZeroDivisionError as e: raise Short("x") from e
    if kind == "unicode": b"\\xff".decode()
    if kind == "exit": raise SystemExit(3)
    if kind == "stop": raise StopIteration("end")
    if kind == "index": [][1]
    if kind == "attribute": None.x
    if kind == "type": len(3)
class Door:
    def __init__(self, hides=False): self.log, self.hides = [], hides
    def __enter__(self): self.log.append("in"); return self
    def __exit__(self, kind, error, trace):
        self.log.append(kind.__name__ if kind else "out"); return self.hides
    async def __aenter__(self): self.log.append("ain"); return 7
    async def __aexit__(self, *error): self.log.append("aout")
@contextlib.contextmanager
def opened(log):
    log.append("open")
    try: yield len(log)
    finally: log.append("closed")
async def later(x): await asyncio.sleep(0); return x + 1
async def bad(): raise Short("later")
async def ticks(n):
    for i in range(n): yield i
class Count:
    def __init__(self, n): self.n = n
    def __aiter__(self): return self
    async def __anext__(self):
        if not self.n: raise StopAsyncIteration
        self.n -= 1
        return self.n
    def __await__(self): return later(self.n).__await__()
async def through(f, x): return await f(x)
def echo():
    got = yield 1
    while True: got = yield got
def numbers(n):
    yield from range(n)
    return "done"
class Up:
    def __init__(self, n): self.n = n
    def __iter__(self): return self
    def __next__(self):
        if self.n > 2: raise StopIteration
        self.n += 1
        return self.n
class Old:
    def __getitem__(self, i): return [5, 6][i]
def apply(f, *args, **kwargs): return f(*args, **kwargs)
def compose(f, g): return lambda x: f(g(x))
def memo(f):
    @functools.wraps(f)
    def inner(x):
        inner.calls += 1
        return f(x)
    inner.calls = 0
    return inner
def total(xs): return sum(xs)
def order(xs, key): return sorted(xs, key=key)
def clear(xs): xs.clear()
def sort(xs): xs.sort()
def append(xs, x): xs.append(x); return xs
def rotate(grid):
    grid[0], grid[1] = grid[1], grid[0]
    grid[0][0] = 9
def rotate_all(rows):
    for row in rows.values() if isinstance(rows, dict) else rows: row.reverse()
    return rows
def update(d, *, into): into.update(d)
def drop(s): s.discard(1)
def upper(b): b[:] = b.upper()
kept = []
def keep(xs): kept.append(xs)
def grow(): kept[0].append(1)
class Store:
    def __init__(self): self.items = []
    def add(self, x): self.items.append(x)
def node_sum(node): return node._value + (node_sum(node.next) if node.next else 0)
def smaller(a, b): return a if a < b else b
def seen(xs): return len(set(xs))
def use(thing):
    with thing as t: return t
def attempt(f):
    try: f()
    except LookupError as e: return type(e).__name__, e.args
def again(f): f(); return f()
"""
# Each with its name before it.
_STATEMENTS = r"""
# a class of errors
try:
  fail('missing')
except Missing as e:
  assert e.code == 404
# a base of it
try:
  fail('missing')
except AppError as e:
  assert str(e) == "'gone'"
# a base of Python
try:
  fail('missing')
except KeyError as e:
  assert e.args == ('gone',)
# derived
try:
  fail('short')
except ValueError as e:
  assert str(e) == 'too short'
# its class
try:
  fail('short')
except Exception as e:
  assert type(e) is Short
# of the library
import json
try:
  fail('json')
except json.JSONDecodeError as e:
  assert e.pos == 1
# of a module that is not imported
try:
  fail('json')
except ValueError as e:
  assert type(e).__name__ == 'JSONDecodeError'
# its text
try:
  fail('key')
except KeyError as e:
  assert str(e) == "'k'"
# its cause
try:
  fail('cause')
except Short as e:
  assert isinstance(e.__cause__, ZeroDivisionError)
# of many arguments
try:
  fail('unicode')
except UnicodeDecodeError as e:
  assert e.start == 0
# an exit
try:
  fail('exit')
except SystemExit as e:
  assert e.code == 3
# an end
try:
  fail('stop')
except StopIteration as e:
  assert e.value == 'end'
# made by a test
e = Missing('a', 1)
assert isinstance(e, KeyError) and e.code == 1
try:
  raise e
except AppError as f:
  assert f is e
# assertRaises
import unittest
t = unittest.TestCase()
for kind, error in [('missing', Missing), ('short', ValueError), ('stop', StopIteration),
                    ('index', IndexError), ('attribute', AttributeError), ('type', TypeError)]:
  with t.assertRaises(error): fail(kind)
  t.assertRaises(error, fail, kind)
assert True
# assertRaisesRegex
import unittest
with unittest.TestCase().assertRaisesRegex(Short, 'too'):
  fail('short')
assert True
# suppress
import contextlib
with contextlib.suppress(IndexError):
  fail('index')
assert True
# a guard
def raises(error, f, *a):
  try:
    f(*a)
  except error:
    return True
  return False
assert raises(IndexError, fail, 'index') and not raises(KeyError, fail)
assert all(raises(TypeError, fail, k) for k in ['type'])
# with
d = Door()
with d as inner:
  assert inner is d
assert d.log == ['in', 'out']
# with an error
d = Door(True)
with d:
  raise ValueError('x')
assert d.log[1] == 'ValueError'
# with, not hidden
d = Door()
try:
  with d:
    fail('short')
except Short:
  assert d.log == ['in', 'Short']
# contextmanager
log = []
with opened(log) as n:
  assert n == 1 and log == ['open']
assert log == ['open', 'closed']
# coroutines
import asyncio
assert asyncio.run(later(1)) == 2
async def both():
  return await asyncio.gather(later(1), later(2))
assert asyncio.run(both()) == [2, 3]
# an error later
import asyncio
try:
  asyncio.run(bad())
except Short as e:
  assert str(e) == 'later'
# async for and with
import asyncio
async def main():
  found = [x async for x in ticks(3)]
  found += [x async for x in Count(2)]
  d = Door()
  async with d as x:
    found.append(x)
  return found, d.log, await Count(4)
assert asyncio.run(main()) == ([0, 1, 2, 1, 0, 7], ['ain', 'aout'], 5)
# a coroutine of the tests
import asyncio
async def twice(x):
  await asyncio.sleep(0)
  return 2 * await later(x)
assert asyncio.run(through(twice, 3)) == 8
# wait_for
import asyncio
assert asyncio.run(asyncio.wait_for(later(1), 5)) == 2
assert asyncio.iscoroutine(c := later(1))
c.close()
# generators
import types
g = numbers(3)
assert isinstance(g, types.GeneratorType)
assert next(g) == 0 and list(g) == [1, 2] and list(g) == [] and next(g, 9) == 9
# what a generator is sent
g = echo()
assert next(g) == 1 and g.send(5) == 5
g.close()
# what it returns
def outer():
  x = yield from numbers(2)
  yield x
assert list(outer()) == [0, 1, 'done']
# iterators
assert list(Up(0)) == [1, 2, 3] and next(iter(Up(1))) == 2 and max(Up(0)) == 3
assert list(Old()) == [5, 6] and 6 in Old() and dict(enumerate(Up(1))) == {0: 2, 1: 3}
# functions
assert compose(lambda x: x + 1, abs)(-3) == 4 and compose(str, len)([1]) == '1'
# Python's functions
import math, operator, functools
assert apply(math.sqrt, 9) == 3 and apply(str.upper, 'a') == 'A' and apply(len, [1]) == 1
assert apply(operator.add, 1, 2) == 3 and apply(operator.itemgetter(1), [1, 2]) == 2
assert apply(functools.partial(pow, 2), 3) == 8 and apply(int, '7') == 7
assert order(['bb', 'a'], len) == ['a', 'bb'] and order(['B', 'a'], str.lower) == ['a', 'B']
# methods of a container
out = []
apply(out.append, 3)
assert out == [3]
# objects to call
class Add:
  def __call__(self, x): return x + 1
assert apply(Add(), 1) == 2
# mocks
from unittest.mock import Mock
m = Mock(return_value=4)
assert apply(m, 1, a=2) == 4
m.assert_called_once_with(1, a=2)
# decorators
@memo
def square(x): return x * x
assert square(3) == 9 and square.calls == 1
assert square.__name__ == 'square'
# iterators of the tests
assert total(x for x in [1, 2]) == 3 and total(map(int, '12')) == 3
assert total(iter([1])) == 1 and total({1: 2}.values()) == 2 and total(range(4)) == 6
# an emptied list
xs = [1, 2]
clear(xs)
assert xs == []
# an emptied dict
d = {1: 2}
clear(d)
assert d == {} and not d
# emptied in an assert
xs = [1, 2]
assert clear(xs) is None
assert xs == []
# emptied in the same assert
xs = [1, 2]
assert clear(xs) is None and xs == []
# in a tuple
xs = [2, 1]
assert (sort(xs), xs) == (None, [1, 2])
# the same list
xs = [1]
assert append(xs, 2) is xs
assert xs == [1, 2]
# returned
xs = [1]
ys = append(xs, 2)
assert ys is xs and xs == [1, 2]
# named
xs = [2, 1]
sort(xs=xs)
assert xs == [1, 2]
# into
d = {}
update({1: 2}, into=d)
assert d == {1: 2}
# of lists
a, b = [1], [2]
grid = [a, b]
rotate(grid)
assert grid == [[9], [1]] and grid[0] is b and a == [1] and b == [9]
# deep inside, in an assert
assert rotate_all([[1, 2], [3]]) == [[2, 1], [3]]
a = [1, 2]
assert rotate_all([(a, a)][0]) == ([1, 2], [1, 2])
assert a == [1, 2]
assert rotate_all([a, a])[0] == [1, 2] and rotate_all({0: a})[0] == [2, 1] and a == [2, 1]
# twice in one
row = [0]
grid = [row, row]
rotate(grid)
assert grid == [[9], [9]] and row == [9]
# sets and bytes
s, b = {1, 2}, bytearray(b'a')
drop(s)
upper(b)
assert s == {2} and b == b'A'
# in itself
xs = [1]
xs.append(xs)
assert append(xs, 3) is xs and len(xs) == 3
# kept by the program
xs = []
keep(xs)
grow()
assert xs == [1]
xs.append(2)
grow()
assert xs == [1, 2, 1]
# an attribute
s = Store()
xs = s.items
s.add(1)
assert xs == [1]
xs.append(2)
assert s.items == [1, 2] and s.items is xs
s.items.pop()
assert s.items == [1]
# set from outside
s = Store()
s.items = [5]
s.add(6)
assert s.items == [5, 6]
del s.items
assert not hasattr(s, 'items')
# objects of the tests
class N:
  def __init__(self, v, n=None): self._value, self.next = v, n
assert node_sum(N(1, N(2))) == 3
# operators of the tests
import functools
@functools.total_ordering
class V:
  def __init__(self, n): self.n = n
  def __lt__(self, o): return self.n < o.n
  def __eq__(self, o): return self.n == o.n
  def __hash__(self): return self.n
a, b = V(1), V(2)
assert smaller(b, a) is a and seen([a, b, V(1)]) == 2
assert order([b, a], None)[0] is a
# a context of the tests
class C:
  def __enter__(self): return 3
  def __exit__(self, *e): return False
assert use(C()) == 3
# errors of the tests
class Lost(KeyError): pass
def f(): raise Lost('a')
assert attempt(f) == ('Lost', ('a',))
try:
  apply(f)
except Lost as e:
  assert e.args == ('a',)
# state of the tests
n = 0
def f():
  global n
  n += 1
  return n
assert again(f) == 2 and n == 2
# threads
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(2) as pool:
  assert list(pool.map(total, [[1], [2, 3]])) == [1, 5]
  assert isinstance(pool.submit(fail, 'index').exception(), IndexError)
# patterns
match Store():
  case Store(items=[]):
    found = 1
  case _:
    found = 0
assert found == 1
"""
STATEMENTS = dict(part.split("\n", 1) for part in _STATEMENTS.split("\n# ") if part.strip())
