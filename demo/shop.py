"""What happens in the shop: each method is one transaction, as an application would write it.

All state is in the database, so that a shop may be reopened after any crash. The choices come from
the random numbers handed in.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from decimal import Decimal
from importlib import resources
from random import Random
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

Connection = psycopg.Connection[tuple[Any, ...]]

_NAMES = (
    "Ada Lovelace", "Zoë O'Neill", "Łukasz Żak", "Nguyễn Văn An", "山田 太郎",
    'Bo "B" Li', "Ján Čapek",
)  # fmt: skip
_NOTES = (None, "", "Ring twice", "Gift 🎁, no invoice", 'Say "hello"\nat the back\\side door')
_INTERESTS = ("tea", "maps, old", "rivers", 'so-called "art"', "NULL", "Ünïcode")
_CITIES = ("London", "København", "Kraków", "São Paulo")
_TITLES = ("Teapot", "River map", "Walking stick", "Lantern", "Umbrella", "Field notes", "Compass")

_ADD_CUSTOMER = """
INSERT INTO customers (name, email, interests, newsletter, address) VALUES (%s, %s, %s, %s, %s)
"""
_IMPORT_CUSTOMERS = """
INSERT INTO customers (name, email, interests, address)
SELECT 'Guest ' || i, %s || '-' || i || '@example.net', ARRAY['import', i::text],
       jsonb_build_object('batch', %s::text, 'row', i)
  FROM generate_series(1, %s) AS i
"""
# A place in the range of ids, and the next customer from there: no scan, however many there are.
_SOME_CUSTOMER = """
SELECT id FROM customers WHERE id >= (%s * (SELECT max(id) FROM customers))::bigint
 ORDER BY id LIMIT 1
"""
_ADD_PRODUCT = """
INSERT INTO products (sku, title, price, stock, weight_kg, attributes)
VALUES (%s, %s, %s, %s, %s, %s)
"""
_ON_SALE = "SELECT sku, price FROM products WHERE NOT discontinued ORDER BY sku LIMIT 100"
_SELL = "UPDATE products SET stock = stock - %s WHERE sku = %s"
_ADD_ORDER = "INSERT INTO orders (id, customer_id, note) VALUES (%s, %s, %s)"
_ADD_ITEM = """
INSERT INTO order_items (order_id, line, sku, quantity, unit_price) VALUES (%s, %s, %s, %s, %s)
"""
_TOTAL = "UPDATE orders SET total = %s WHERE id = %s"
_AMENDMENTS = (
    "UPDATE customers SET newsletter = NOT newsletter WHERE id = %s",
    "UPDATE customers SET interests = array_append(interests[:3], 'new') WHERE id = %s",
)
_OLDEST = "SELECT id FROM orders WHERE status = %s ORDER BY placed_at LIMIT 1"


class Shop:
    """A shop that is open for business on one autocommit connection."""

    def __init__(self, connection: Connection, choose: Random) -> None:
        self._connection = connection
        self._choose = choose
        busy: tuple[tuple[Callable[[], None], int], ...] = (
            (self.order, 30), (self.pay, 20), (self.ship, 18), (self.clear, 14), (self.join, 8),
            (self.amend, 8), (self.restock, 5), (self.reprice, 4), (self.rename, 2),
            (self.introduce, 2), (self.withdraw, 1), (self.change_of_mind, 4),
        )  # fmt: skip
        self._deeds = [deed for deed, _ in busy]
        self._weights = [weight for _, weight in busy]

    def open(self) -> None:
        """Stock the shelves and let the first customers in, in one transaction; once."""
        with self._connection.transaction():
            row = self._connection.execute("SELECT count(*) FROM products").fetchone()
            if row is not None and row[0]:
                return
            for _ in range(12):
                self.introduce()
            for _ in range(20):
                self.join()

    def trade(self) -> None:
        """One transaction, usual or odd."""
        self._choose.choices(self._deeds, self._weights)[0]()

    def join(self) -> None:
        choose = self._choose
        address = {"city": choose.choice(_CITIES), "floor": choose.randint(-1, 9), "flat": None}
        self._connection.execute(
            _ADD_CUSTOMER,
            (
                choose.choice(_NAMES),
                f"{self._code()}@example.com",
                choose.sample(_INTERESTS, choose.randint(0, 4)),
                choose.random() < 0.5,
                Jsonb(address) if choose.random() < 0.8 else None,
            ),
        )

    def order(self) -> None:
        with self._connection.transaction():
            self._place_order()
            if self._choose.random() < 0.1:  # one more line, taken back
                with self._connection.transaction() as savepoint:
                    self._place_order()
                    raise psycopg.Rollback(savepoint)

    def change_of_mind(self) -> None:
        """Everything of an order, and none of it happened."""
        with self._connection.transaction():
            self._place_order()
            raise psycopg.Rollback

    def pay(self) -> None:
        self._advance("placed", "UPDATE orders SET status = 'paid' WHERE id = %s")

    def ship(self) -> None:
        self._advance(
            "paid", "UPDATE orders SET status = 'shipped', shipped_on = current_date WHERE id = %s"
        )

    def clear(self) -> None:
        """Forget the oldest order that was shipped."""
        self._advance(
            "shipped",
            "DELETE FROM order_items WHERE order_id = %s",
            "DELETE FROM orders WHERE id = %s",
        )

    def amend(self) -> None:
        """A customer changes their mind twice within one transaction."""
        with self._connection.transaction():
            customer = self._some_customer()
            for statement in _AMENDMENTS:
                self._connection.execute(statement, (customer,))

    def restock(self) -> None:
        self._connection.execute("UPDATE products SET stock = stock + 50 WHERE stock < 100")

    def reprice(self) -> None:
        sku, price = self._choose.choice(self._on_sale())
        cents = Decimal(self._choose.randint(-99, 99)) / 100
        self._connection.execute(
            "UPDATE products SET price = %s, attributes = attributes || %s WHERE sku = %s",
            (max(price + cents, Decimal("0.50")), Jsonb({"was": float(price)}), sku),
        )

    def rename(self) -> None:
        """A product gets another key."""
        sku, _ = self._choose.choice(self._on_sale())
        self._connection.execute(
            "UPDATE products SET sku = %s WHERE sku = %s", (f"SKU-{self._code()}", sku)
        )

    def introduce(self) -> None:
        choose = self._choose
        self._connection.execute(
            _ADD_PRODUCT,
            (
                f"SKU-{self._code()}",
                choose.choice(_TITLES),
                Decimal(choose.randint(100, 99_900)) / 100,
                choose.randint(0, 500),
                choose.choice([None, 0.1, 1.5, 1e-7, choose.random()]),
                Jsonb({"colour": choose.choice(["red", "blue"]), "barcode": 2**70}),
            ),
        )

    def withdraw(self) -> None:
        """A product leaves the shop, unless it is one of the last."""
        on_sale = self._on_sale()
        if len(on_sale) > 5:
            sku, _ = self._choose.choice(on_sale)
            self._connection.execute("DELETE FROM products WHERE sku = %s", (sku,))

    def import_customers(self, count: int) -> None:
        """One large transaction."""
        batch = self._code()
        self._connection.execute(_IMPORT_CUSTOMERS, (batch, batch, count))

    def _place_order(self) -> None:
        order = uuid.UUID(int=self._choose.getrandbits(128), version=4)
        note = self._choose.choice(_NOTES)
        self._connection.execute(_ADD_ORDER, (order, self._some_customer(), note))
        on_sale = self._on_sale()
        wanted = self._choose.sample(on_sale, self._choose.randint(1, min(3, len(on_sale))))
        total = Decimal(0)
        for line, (sku, price) in enumerate(wanted, 1):
            quantity = self._choose.randint(1, 5)
            total += quantity * price
            self._connection.execute(_ADD_ITEM, (order, line, sku, quantity, price))
            self._connection.execute(_SELL, (quantity, sku))
        self._connection.execute(_TOTAL, (total, order))

    def _advance(self, status: str, *statements: str) -> None:
        """Do something with the oldest order of this status, if there is one."""
        with self._connection.transaction():
            row = self._connection.execute(_OLDEST, (status,)).fetchone()
            for statement in statements if row is not None else ():
                self._connection.execute(statement.encode(), row)

    def _some_customer(self) -> int:
        row = self._connection.execute(_SOME_CUSTOMER, (self._choose.random(),)).fetchone()
        assert row is not None  # an open shop has customers
        return int(row[0])

    def _on_sale(self) -> list[tuple[str, Decimal]]:
        return [(sku, price) for sku, price in self._connection.execute(_ON_SALE)]

    def _code(self) -> str:
        return f"{self._choose.getrandbits(48):012X}"


def create_shop(connection: Connection) -> None:
    """Make the shop's tables, unless they are there."""
    connection.execute((resources.files(__package__) / "shop.sql").read_bytes())
