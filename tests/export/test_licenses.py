"""Licenses that prevent using a model are named, with their meaning."""

from expertflow.export.licenses import PERMISSIVE, Licensed, find_conflicts, hub_license


def made_from(base: str | None, *sources: str | None) -> list[Licensed]:
    data = [Licensed(name=f"s{i}", license=license) for i, license in enumerate(sources)]
    return [Licensed(name="b", license=base, is_base=True), *data]


def test_terms_follow_from_a_licenses_name() -> None:
    expected = {
        ("share-alike",): ("cc-by-sa-4.0", "AGPL-3.0-only", "odbl", "osl-3.0", "eupl-1.2"),
        ("non-commercial",): ("qwen-research", "academic use", "CC_BY_NC_4.0"),
        ("non-commercial", "no derivatives"): ("cc-by-nc-nd-4.0", "CC BY-NC-NoDerivs 3.0"),
        ("no derivatives",): ("cc-by-nd-4.0", "Attribution, No Derivatives"),
        ("non-commercial", "share-alike"): ("cc-by-nc-sa-4.0", "odbl, cc-by-nc-4.0"),
        ("other terms",): ("ask us", "mit and ask-us", "lgpl-2.1", "llama3.1"),
        ("not stated",): (None, " "),
        (): ("Apache License 2.0", "The MIT License", *PERMISSIVE),
    }
    for terms, names in expected.items():
        for license in names:
            found = find_conflicts(made_from("mit", license))
            assert tuple(line.split(":")[0] for line in found) == terms
            assert all(f"s0 ({license or 'not stated'})" in line for line in found)
    assert "base model b (not stated)" in find_conflicts(made_from(None, "mit"))[0]


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
