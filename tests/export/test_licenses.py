"""Licenses that prevent using a model are named, with their meaning."""

import pytest

from expertflow.export.licenses import (
    HUB_LICENSES,
    PERMISSIVE,
    Licensed,
    find_conflicts,
    hub_license,
    list_remarks,
)


def made_from(base: str | None, *sources: str | None) -> list[Licensed]:
    data = [Licensed(name=f"s{i}", license=license) for i, license in enumerate(sources)]
    return [Licensed(name="b", license=base, is_base=True), *data]


@pytest.mark.parametrize(
    ("license", "terms"),
    [
        ("cc-by-sa-4.0", ["share-alike"]),
        ("cc-by-nc-nd-4.0", ["non-commercial", "no-derivatives"]),
        ("AGPL-3.0-only", ["share-alike"]),
        ("odbl", ["share-alike"]),
        ("qwen-research", ["non-commercial"]),
        ("apple-amlr", ["non-commercial"]),
        ("academic use", ["non-commercial"]),
        ("non commercial use only", ["non-commercial"]),
        ("CC_BY_NC_4.0", ["non-commercial"]),
        ("c-uda", ["non-commercial"]),
        ("All rights reserved", ["reserved"]),
        ("proprietary", ["reserved"]),
        ("osl-3.0", ["share-alike"]),
        ("eupl-1.2", ["share-alike"]),
        ("mpl-2.0", ["weak copyleft"]),
        ("EPL 2.0", ["weak copyleft"]),
        ("lgpl-2.1", ["weak copyleft"]),
        ("llama3.1", ["own terms"]),
        ("gemma", ["own terms"]),
        ("bigcode-openrail-m", ["own terms"]),
        ("ask us", ["unknown terms"]),
        ("mit and ask-us", ["unknown terms"]),
        ("Apache License 2.0", []),
        ("The MIT License", []),
        ("MIT or Apache-2.0", []),
        ("mit, cc-by-nc-4.0", ["non-commercial"]),
        ("cdla-sharing-1.0", ["share-alike"]),
        (None, ["not stated"]),
    ],
)
def test_terms_are_read_off_a_licenses_name(license: str | None, terms: list[str]) -> None:
    found = find_conflicts(made_from("mit", license))
    assert [line.split(":")[0] for line in found if "incompatible" not in line] == terms
    for line in found:
        assert f"s0 ({license or 'not stated'})" in line


def test_the_base_models_license_counts_as_well() -> None:
    assert "base model b (not stated)" in find_conflicts(made_from(None, "mit"))[0]
    assert "base model b (cc-by-nc-4.0)" in find_conflicts(made_from("cc-by-nc-4.0", "mit"))[0]


@pytest.mark.parametrize(
    ("base", "sources", "pairs"),
    [
        ("apache-2.0", ("cc-by-sa-4.0", "cc-by-sa-4.0"), 0),
        ("apache-2.0", ("cc-by-sa-4.0", "cc-by-nc-4.0"), 1),
        ("apache-2.0", ("cc-by-sa-4.0", "gpl-3.0"), 2),
        ("gemma", ("cc-by-sa-4.0",), 1),
    ],
)
def test_licenses_that_cannot_be_kept_at_once_are_named(
    base: str, sources: tuple[str, ...], pairs: int
) -> None:
    found = find_conflicts(made_from(base, *sources))
    assert sum(line.startswith("incompatible") for line in found) == pairs


def test_different_licenses_and_attribution_are_said() -> None:
    differ = "do not share one license"
    for other, are_said in (("apache-2.0", True), ("MIT", False), (None, True)):
        said = list_remarks(made_from("mit", "mit", other))
        assert any(differ in line for line in said) == are_said
    [*_, asked] = list_remarks(made_from("mit", "cc-by-4.0"))
    assert asked == "Attribution is asked for: s0 (cc-by-4.0)."
    assert list_remarks(made_from("mit", "mit")) == []


@pytest.mark.parametrize(
    ("base", "sources", "declared"),
    [
        ("apache-2.0", ("mit", "cc-by-4.0"), "apache-2.0"),
        ("apache-2.0", ("cc-by-sa-4.0",), "other"),
        ("apache-2.0", (None,), "other"),
        ("Apache License 2.0", ("CC BY 4.0",), "apache-2.0"),
        ("some words", ("mit",), "other"),
        ("cc-by-sa-4.0", ("cc-by-sa-4.0",), "cc-by-sa-4.0"),
        (None, ("mit",), None),
    ],
)
def test_only_a_license_that_follows_is_declared(
    base: str | None, sources: tuple[str | None, ...], declared: str | None
) -> None:
    assert hub_license(made_from(base, *sources)) == declared


def test_permissive_licenses_are_known_to_the_hub_and_ask_for_nothing() -> None:
    assert PERMISSIVE <= HUB_LICENSES
    assert not any(Licensed(name="", license=name).terms for name in PERMISSIVE)
