"""Queries judged on databases made from the text of a schema."""

from collections.abc import Iterator

import pytest
from made_up_documents import one_sql_process, score

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.isolation.sql_worker import Limits
from expertflow.evaluate.records import Judgment
from expertflow.evaluate.tasks.sql_execution import SqlExecution

LIMITS = Limits(n_instructions=20_000_000, n_rows=1_000, memory_bytes=1 << 30, wall_s=120)
TABLES = """
CREATE TABLE customers (id INT PRIMARY KEY, name VARCHAR(50), city TEXT);
CREATE TABLE orders (id INT, customer_id INT, total DECIMAL(8, 2), placed DATE);
"""
ROWS = """
INSERT INTO customers VALUES (1, 'Ann', 'Oslo'), (2, 'Bob', 'Rome');
INSERT INTO orders VALUES (7, 1, 5.00, '2023-01-02'), (8, 2, 9.50, '2023-02-03');
"""


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    with one_sql_process(LIMITS):
        yield


def judge(schema: str, gold: str, *predictions: str, limits: Limits = LIMITS) -> list[Judgment]:
    attributes = {"limits": limits}
    return score(SqlExecution, predictions, gold, attributes=attributes, schema=schema)


def kinds(schema: str, gold: str, *predictions: str) -> list[str]:
    return [judgment.kind for judgment in judge(schema, gold, *predictions)]


SOME = "SELECT name FROM customers WHERE city = 'Oslo'"
COUNTED = "SELECT count(*) FROM orders WHERE total > 5"
FIRST = "SELECT name FROM customers ORDER BY id LIMIT 1"
JOINED = "SELECT c.name, sum(o.total) FROM customers c JOIN orders o ON o.customer_id = c.id"


@pytest.mark.parametrize(
    ("gold", "right", "lucky"),
    [
        # Each of the lucky ones returns the reference's rows on the given database.
        (SOME, ["select name from customers where city='Oslo'"],
         ["SELECT 'Ann'", "SELECT name FROM customers LIMIT 1",
          "SELECT name FROM customers WHERE city <> 'Rome'",
          "SELECT name FROM customers WHERE id = 1"]),
        (COUNTED, ["SELECT count(1) FROM orders WHERE NOT total <= 5"],
         ["SELECT 1", "SELECT count(*) FROM orders WHERE total >= 6",
          "SELECT count(*) FROM orders WHERE total > 5.5",
          "SELECT count(DISTINCT total) FROM orders WHERE total > 5",
          "SELECT min(total) > 1 FROM orders"]),
        (FIRST, ["SELECT name FROM customers WHERE id = (SELECT min(id) FROM customers)"],
         ["SELECT min(name) FROM customers", "SELECT name FROM customers WHERE id < 2"]),
        (f"{JOINED} GROUP BY c.id", [f"{JOINED} GROUP BY c.id, c.name ORDER BY 2"],
         [f"{JOINED} GROUP BY c.name", f"{JOINED.replace('JOIN', 'LEFT JOIN')} GROUP BY c.id",
          f"{JOINED.replace('sum', 'max')} GROUP BY c.id"]),
    ],
)  # fmt: skip
def test_lucky_hits_do_not_count(gold: str, right: list[str], lucky: list[str]) -> None:
    predictions = [gold, *right, *lucky]
    found = kinds(TABLES + ROWS, gold, *predictions)
    assert found == ["correct"] * (1 + len(right)) + ["wrong_elsewhere"] * len(lucky)
    # A schema without rows has only made-up databases.
    assert kinds(TABLES, gold, *predictions)[: 1 + len(right)] == found[: 1 + len(right)]
    assert not any(one.correct for one in judge(TABLES, gold, *lucky))


def test_queries_wrong_on_the_given_rows_are_distinguished() -> None:
    predictions = ["SELECT name FROM customers", "SELECT nope", "DROP TABLE customers", ""]
    wrong = ["wrong_rows", "syntax_error", "not_a_query", "empty"]
    assert kinds(TABLES + ROWS, SOME, *predictions) == wrong


def test_large_numbers_and_late_days_are_not_faults() -> None:
    late = "SELECT id FROM orders WHERE placed < '9999-12-31' AND total < 9999999999999999999999"
    gold = f"{late} LIMIT 99999999999"
    assert kinds(TABLES, gold, gold, late, "SELECT 7") == ["correct", "correct", "wrong_rows"]


def test_the_same_databases_are_made_in_each_process() -> None:
    predictions = [SOME, "SELECT name FROM customers LIMIT 1"]
    expected = judge(TABLES, SOME, *predictions)
    assert judge(TABLES, SOME, *predictions, limits=Limits()) == expected


MYSQL = r"""
-- MySQL dump 10.13  Distrib 8.0.33, for Linux (x86_64)
/*!40014 SET FOREIGN_KEY_CHECKS=0 */;
SET NAMES utf8mb4;
DROP TABLE IF EXISTS `customers`;
CREATE TABLE `customers` (
  `id` int(11) unsigned NOT NULL AUTO_INCREMENT,
  `email` varchar(255) COLLATE utf8mb4_unicode_ci NOT NULL,
  `status` enum('active','blocked') NOT NULL DEFAULT 'active',
  `updated` datetime DEFAULT CURRENT_TIMESTAMP ON UPDATE CURRENT_TIMESTAMP,
  `meta` json DEFAULT NULL COMMENT 'free form',
  PRIMARY KEY (`id`),
  UNIQUE KEY `u_email` (`email`),
  KEY `k_status` (`status`, `updated`)
) ENGINE=InnoDB AUTO_INCREMENT=12 DEFAULT CHARSET=utf8mb4;
LOCK TABLES `customers` WRITE;
INSERT INTO `customers` (`email`, `status`) VALUES ('ann@x.org', 'active'),
  ('bob\'s@x.org', 'blocked');
UNLOCK TABLES;
"""
PHPMYADMIN = """
SET SQL_MODE = "NO_AUTO_VALUE_ON_ZERO";
START TRANSACTION;
CREATE TABLE `u` (`id` int(11) NOT NULL, `on` bit(1) NOT NULL DEFAULT b'1',
  `n` int(10) zerofill) ENGINE=InnoDB;
INSERT INTO `u` (`id`, `on`, `n`) VALUES (1, b'1', 10), (2, b'0', 20);
ALTER TABLE `u` ADD PRIMARY KEY (`id`), ADD KEY `k` (`n`);
ALTER TABLE `u` MODIFY `id` int(11) NOT NULL AUTO_INCREMENT, AUTO_INCREMENT=3;
COMMIT;
"""
SQL_SERVER = """
USE [Shop]
GO
CREATE TABLE [sales].[Item](
	[Id] [int] IDENTITY(1,1) NOT NULL,
	[Name] [nvarchar](max) NOT NULL,
	[Flag] [bit] NOT NULL DEFAULT ((1)),
	[Made] [datetime2](7) NOT NULL DEFAULT SYSDATETIME(),
	[Price] [decimal](18, 2) NULL,
 CONSTRAINT [PK_Item] PRIMARY KEY CLUSTERED ([Id] ASC) WITH (PAD_INDEX = OFF) ON [PRIMARY]
) ON [PRIMARY] TEXTIMAGE_ON [PRIMARY]
GO
SET IDENTITY_INSERT [sales].[Item] ON
INSERT [sales].[Item] ([Id], [Name], [Made], [Price])
VALUES (1, N'Pen', CAST(N'2019-01-02T00:00:00' AS DateTime2), 1.5000)
INSERT [sales].[Item] ([Id], [Name], [Made], [Price])
VALUES (2, N'Ink', CAST(N'2020-01-02T00:00:00' AS DateTime2), 2.5000)
GO
ALTER TABLE [sales].[Item] WITH CHECK ADD CONSTRAINT [CK] CHECK (([Price]>(0)))
GO
"""
POSTGRES = """
SET statement_timeout = 0;
SELECT pg_catalog.set_config('search_path', '', false);
CREATE TYPE mood AS ENUM ('sad', 'ok');
CREATE TABLE public.users (
    id integer NOT NULL,
    name character varying(50) DEFAULT 'x'::character varying NOT NULL,
    tags text[], data jsonb DEFAULT '{}'::jsonb, m mood,
    born timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT c CHECK (((name)::text = ANY ((ARRAY['a'::character varying])::text[])))
);
ALTER TABLE public.users OWNER TO postgres;
CREATE SEQUENCE public.users_id_seq START WITH 1 INCREMENT BY 1;
ALTER TABLE ONLY public.users ALTER COLUMN id SET DEFAULT nextval('public.users_id_seq'::regclass);
INSERT INTO public.users (id, name, born) VALUES (1, 'Ann', '2020-01-01'::timestamp),
  (2, 'Bob', now());
ALTER TABLE ONLY public.users ADD CONSTRAINT users_pkey PRIMARY KEY (id);
CREATE INDEX ix ON public.users USING btree (name);
"""
PLACES = r"""
CREATE TABLE `shop` (`id` int NOT NULL, `at` point NOT NULL /*!80003 SRID 4326 */, `name` text,
  PRIMARY KEY (`id`), SPATIAL KEY `k` (`at`));
INSERT INTO `shop` VALUES (1, ST_GeomFromText('POINT(1 2)', 4326), 'Ann\'s'),
  (2, _binary '\0\0x', 'Bob''s');
DELIMITER ;;
/*!50003 CREATE*/ /*!50003 TRIGGER `t` BEFORE INSERT ON `shop` FOR EACH ROW BEGIN
  SET NEW.name = UPPER(NEW.name); DELETE FROM shop; END */;;
DELIMITER ;
CREATE DEFINER=`root`@`%` TRIGGER u BEFORE UPDATE ON shop FOR EACH ROW SET NEW.name = 'x';
"""
COPIED = r"""
CREATE FUNCTION public.f() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN NEW.name := upper(NEW.name); RETURN NEW; END; $$;
CREATE TABLE public.users (id integer NOT NULL, name text, paid numeric, active boolean);
CREATE TRIGGER t BEFORE INSERT ON public.users FOR EACH ROW EXECUTE FUNCTION public.f();
COPY public.users (id, name, paid, active) FROM stdin;
1	Ann's; \tA	2.5	t
2	\N	10	f
\.
COPY public.users (id) FROM stdin;
\.
"""
TRIGGERED = """
CREATE TABLE t (id INT, name TEXT);
CREATE TRIGGER u AFTER INSERT ON t BEGIN UPDATE t SET name = 'x'; END;
INSERT INTO t VALUES (1, 'a'), (2, 'b');
"""
BATCHES = """
CREATE TABLE [dbo].[t]([id] [int] NOT NULL, [name] [nvarchar](9), INDEX [i] NONCLUSTERED ([name]))
GO
CREATE TRIGGER [dbo].[u] ON [dbo].[t] AFTER INSERT AS BEGIN
  SET NOCOUNT ON
  INSERT [dbo].[t] VALUES (7, N'x')
END
GO
INSERT [dbo].[t] VALUES (1, N'a')
INSERT [dbo].[t] VALUES (2, N'b')
GO
"""


@pytest.mark.parametrize(
    ("schema", "gold", "right", "wrong"),
    [
        (MYSQL, "SELECT `email` FROM `customers` WHERE `status` = 'active'",
         "SELECT email FROM customers WHERE NOT status <> 'active'", "SELECT 'ann@x.org'"),
        (MYSQL, "SELECT count(*) FROM customers", "SELECT count(DISTINCT id) FROM customers",
         "SELECT 2"),
        (MYSQL, "SELECT `id` FROM `customers` WHERE IF(`status` = 'active', 1, 0) = 1",
         "SELECT id FROM customers WHERE status = 'active'", "SELECT 1"),
        (PHPMYADMIN, "SELECT `id` FROM `u` WHERE `on` = 1 AND `n` > 5",
         "SELECT id FROM u WHERE n > 5 AND `on` = b'1'", "SELECT 1"),
        (SQL_SERVER, "SELECT TOP 1 [Name] FROM [sales].[Item] ORDER BY [Id]",
         "SELECT Name FROM sales.Item WHERE Id = (SELECT MIN(i.Id) FROM sales.Item i)",
         "SELECT MAX(Name) FROM sales.Item"),
        (SQL_SERVER, "SELECT COUNT(*) FROM sales.Item WHERE Name <> N'Pen' AND Made < '2020-05-01'",
         "SELECT COUNT(Id) FROM Item WHERE NOT Name = 'Pen' AND Made < N'2020-05-01'", "SELECT 1"),
        (POSTGRES, "SELECT name FROM public.users WHERE born < '2021-01-01'",
         "SELECT users.name FROM users WHERE users.born < '2021-01-01'", "SELECT 'Ann'"),
        ("CREATE TABLE e (id INT AUTO_INCREMENT, k ENUM('a', 'b'), PRIMARY KEY (ID), KEY i (k))",
         "SELECT id FROM e WHERE k = 'a'", "SELECT id FROM e WHERE 'a' = k", "SELECT id FROM e"),
        ("CREATE TABLE e (id INT, k TEXT, `key` TEXT, INDEX i (k), FULLTEXT KEY (k))",
         "SELECT * FROM e WHERE k <> 'a'", "SELECT id, k, `key` FROM e WHERE NOT k = 'a'",
         "SELECT * FROM e"),
        ("CREATE TABLE e (id INT, k VARCHAR(9), KEY i (k))",
         "SELECT * FROM e", "SELECT id, k FROM e", "SELECT id FROM e"),
        (PLACES, "SELECT id FROM shop WHERE name = 'Ann''s' AND `at` = 'POINT(1 2)'",
         "SELECT id FROM shop WHERE `at` = 'POINT(1 2)' AND name = 'Ann''s'",
         "SELECT id FROM shop WHERE name < 'B'"),
        (COPIED, "SELECT name FROM users WHERE active AND paid < 10",
         "SELECT name FROM public.users WHERE 10 > paid AND active = true",
         "SELECT 'Ann''s; \tA'"),
        (TRIGGERED, "SELECT name FROM t WHERE id = 1", "SELECT name FROM t WHERE 1 = id",
         "SELECT 'a'"),
        (BATCHES, "SELECT name FROM t WHERE id < 8", "SELECT name FROM dbo.t WHERE 8 > id",
         "SELECT name FROM t"),
    ],
)  # fmt: skip
def test_statements_of_other_databases_are_left_out_of_a_schema(
    schema: str, gold: str, right: str, wrong: str
) -> None:
    # A dump's rows are the first database; a query that is right there by luck is wrong elsewhere.
    kind = "wrong_elsewhere" if "INSERT" in schema or "COPY" in schema else "wrong_rows"
    assert kinds(schema, gold, gold, right, wrong) == ["correct", "correct", kind]


def test_an_unknown_name_is_still_an_error() -> None:
    gold = "SELECT Name FROM sales.Item WHERE Id = 1"
    assert kinds(SQL_SERVER, gold, gold.replace("sales", "other")) == ["syntax_error"]


def test_booleans_have_no_other_numbers() -> None:
    schema = "CREATE TABLE t (id INT PRIMARY KEY, active BOOLEAN)"
    found = "SELECT id FROM t WHERE active"
    others = [f"{found} <> 0", f"{found} = 0", "SELECT id FROM t"]
    right = ["correct"] * 2
    assert kinds(schema, f"{found} = 1", found, *others)[:2] == right
    assert "correct" not in kinds(schema, f"{found} = 1", *others[1:])


SPINS = "WITH RECURSIVE n(x) AS (VALUES(1) UNION ALL SELECT x + 1 FROM n) SELECT x FROM n"


@pytest.mark.parametrize(
    ("schema", "gold", "why"),
    [
        ("a table of people", "SELECT 1", "its schema cannot be built: near"),
        ("", "SELECT 1", "its schema has no table"),
        (TABLES, "SELECT nope FROM customers", "its reference query fails .*no such column: nope"),
        (TABLES, "SELECT 1 FROM customers WHERE 1 > 2", "returns the same rows on every database"),
        (TABLES, "SELECT 5", "returns the same rows on every database"),
        (f"CREATE TABLE t (a); INSERT INTO t {SPINS}", "SELECT a FROM t", "cannot be built"),
        ("ATTACH 'x.db' AS x; CREATE TABLE t (a)", "SELECT a FROM t", "cannot be built: not auth"),
        ("CREATE TABLE t (a); PRAGMA writable_schema = 1", "SELECT a FROM t", "cannot be built"),
        ("CREATE VIRTUAL TABLE t USING fts5(a)", "SELECT a FROM t", "cannot be built"),
        (f"CREATE TABLE t (a); -- {'x' * 200_000}", "SELECT a FROM t", "longer than 200000"),
        ("CREATE TABLE t (a); INSERT INTO t VALUES ('\0')", "SELECT 1", "embedded null character"),
        ("CREATE TABLE t (a INT);\nCOPY t FROM '/a';", "SELECT a FROM t", "use pg_dump --inserts"),
        ("CREATE TABLE `t` (`a` INT", "SELECT a FROM t", r"as mysql: .* `t` \(`a` INT$"),
    ],
)
def test_an_unusable_reference_has_a_reason(schema: str, gold: str, why: str) -> None:
    with pytest.raises(EvaluationError, match=why):
        judge(schema, gold, gold)
