"""Licenses that prevent using a model are named, with their meaning."""

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


def test_terms_follow_from_a_licenses_name() -> None:
    expected = {
        "share-alike": ("cc-by-sa-4.0", "AGPL-3.0-only", "odbl", "osl-3.0", "eupl-1.2"),
        "non-commercial": ("qwen-research", "apple-amlr", "academic use", "CC_BY_NC_4.0"),
        "reserved": ("All rights reserved", "proprietary"),
        "weak copyleft": ("mpl-2.0", "EPL 2.0", "lgpl-2.1"),
        "own terms": ("llama3.1", "gemma", "bigcode-openrail-m"),
        "unknown terms": ("ask us", "mit and ask-us"),
        "not stated": (None,),
    }
    pairs = [(license, [term]) for term, licenses in expected.items() for license in licenses]
    both = ["non-commercial", "no-derivatives"]
    pairs += [("cdla-sharing-1.0", ["share-alike"]), ("cc-by-nc-nd-4.0", both)]
    more = ("c-uda", "non commercial use only", "mit, cc-by-nc-4.0")
    pairs += [(license, ["non-commercial"]) for license in more]
    pairs += [(one, []) for one in ("Apache License 2.0", "The MIT License", "MIT or Apache-2.0")]
    for license, terms in pairs:
        found = find_conflicts(made_from("mit", license))
        assert [line.split(":")[0] for line in found if "incompatible" not in line] == terms
        assert all(f"s0 ({license or 'not stated'})" in line for line in found)
    assert "base model b (not stated)" in find_conflicts(made_from(None, "mit"))[0]
    assert "base model b (cc-by-nc-4.0)" in find_conflicts(made_from("cc-by-nc-4.0", "mit"))[0]


def test_conflicting_licenses_are_named() -> None:
    for base, sources, n_pairs in (
        ("apache-2.0", ("cc-by-sa-4.0", "cc-by-sa-4.0"), 0),
        ("apache-2.0", ("cc-by-sa-4.0", "cc-by-nc-4.0"), 1),
        ("apache-2.0", ("cc-by-sa-4.0", "gpl-3.0"), 2),
        ("gemma", ("cc-by-sa-4.0",), 1),
    ):
        found = find_conflicts(made_from(base, *sources))
        assert sum(line.startswith("incompatible") for line in found) == n_pairs


def test_different_licenses_and_attribution_are_stated() -> None:
    differ = "have different licenses"
    for other, are_said in (("apache-2.0", True), ("MIT", False), (None, True)):
        remarks = list_remarks(made_from("mit", "mit", other))
        assert any(differ in line for line in remarks) == are_said
    [*_, asked] = list_remarks(made_from("mit", "cc-by-4.0"))
    assert asked == "Attribution is required: s0 (cc-by-4.0)."
    assert list_remarks(made_from("mit", "mit")) == []


def test_a_license_is_declared_only_if_it_follows() -> None:
    for declared, base, *sources in (
        ("apache-2.0", "apache-2.0", "mit", "cc-by-4.0"),
        ("other", "apache-2.0", "cc-by-sa-4.0"),
        ("other", "apache-2.0", None),
        ("apache-2.0", "Apache License 2.0", "CC BY 4.0"),
        ("other", "some words", "mit"),
        ("cc-by-sa-4.0", "cc-by-sa-4.0", "cc-by-sa-4.0"),
        (None, None, "mit"),
    ):
        assert hub_license(made_from(base, *sources)) == declared
    assert PERMISSIVE <= HUB_LICENSES
    assert not any(Licensed(name="", license=name).terms for name in PERMISSIVE)
