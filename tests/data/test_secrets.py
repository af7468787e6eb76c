"""Credentials are found like in the library's own line-by-line scan, only faster."""

import json
import random
import re

import pytest

from expertflow.core.format import unescape
from expertflow.data.secrets import find_secrets, load_detectors, replace_emails

HEX, LOWER, DIGITS = "0123456789abcdef", "abcdefghijklmnopqrstuvwxyz", "0123456789"
UPPER = LOWER.upper()
ALL = LOWER + UPPER + DIGITS
RNG = random.Random(7)


def some(signs: str, n: int) -> str:
    return "".join(RNG.choice(signs) for _ in range(n))


# Kind and shape of one or more for every pattern: {40} is that many letters and digits, {40h} hex
# digits, and so on. Made from parts, so that no scanner finds one in this file.
FORMS = """
Artifactory Credentials: AK|C{20}; Artifactory Credentials: A|PA{20}; AWS Access Key: AK|IA{16u}
AWS Access Key: aws_secret_|key = "{40s}"; Azure Storage Account access key: Account|Key={86}==
Basic Auth Credentials: https:/|/ann:{12}@host.example; Cloudant Credentials: cloudant_apikey|={24a}
Cloudant Credentials: cloudant_pass|word: {64h}; Discord Bot Token: M{23}|.{6}.{27}
Cloudant Credentials: https:/|/a:{64h}@a.cloud|ant.com; GitHub Token: gh|p_{36}
Cloudant Credentials: https:/|/a:{24a}@a.cloud|ant.com; GitHub Token: github|_pat_{82}
GitLab Token: gl|pat-{20}; GitLab Token: gl|pat-{52}.{9a}; GitLab Token: GR|1348941{20}
GitLab Token: gl|cbt-{2h}_{20}; GitLab Token: gl|imt-{25}; GitLab Token: gl|ptt-{40}
GitLab Token: gl|agent-{50}; GitLab Token: gl|oas-{64}; Google API Key: AI|za{35}
Hugging Face Token: h|f_{34m}; IBM Cloud IAM Key: ibm_cloud_iam_|key = {44}
IBM COS HMAC Credentials: cos_hmac_secret_|access_key: {48h}; Mailchimp Access Key: {32h}|-us12
JSON Web Token: eyJhbGciOiJIUzI1NiJ9|.eyJzdWIiOiIxIn0.{43}; OpenAI Token: s|k-{20}T3Blbk|FJ{20}
NPM tokens: /|/registry.example/:_auth|Token=npm_{36}; PyPI Token: py|pi-AgEIcHlwaS5vcmc{80}
Private Key: -----BEGIN DSA PRIVATE |KEY-----; Private Key: -----BEGIN EC PRIVATE |KEY-----
Private Key: -----BEGIN OPENSSH PRIVATE |KEY-----; Private Key: -----BEGIN PRIVATE |KEY-----
Private Key: -----BEGIN PGP PRIVATE |KEY BLOCK-----; Private Key: -----BEGIN RSA PRIVATE |KEY-----
Private Key: -----BEGIN SSH2 ENCRYPTED PRIVATE |KEY-----; Twilio API Key: A|C{32h}
Private Key: PuTTY-User-|Key-File-2: ssh-rsa; Private Key: PuTTY-User-|Key-File-3: ssh-rsa
Private Key: -----BEGIN ENCRYPTED PRIVATE |KEY-----; Telegram Bot Token: 1{9d}|:{35}
PyPI Token: py|pi-AgENdGVzdC5weXBpLm9yZw{80}; SendGrid API Key: S|G.{22}.{43}
Slack Token: xo|xb-{12d}-{24}; Slack Token: https:/|/hooks.slack.com/services/T1/B1/{24}
SoftLayer Credentials: softlayer_api_|key = {64k}; Square OAuth Secret: sq|0csp-{43}
SoftLayer Credentials: https:/|/api.softlayer.com/soap/v3/{64a}; Stripe Access Key: sk|_live_{24}
Twilio API Key: S|K{32h}
1Password Token: ops_|eyJ{300}; Adobe Client Secret: p8e|-{32}; Airtable Token: pat|{14}.{64h}
Age Secret Key: AGE-SECRET|-KEY-1{58u}; Alibaba Cloud Key: LT|AI{20}
Azure Client Secret: {3}8|Q~{34}; Anthropic API Key: sk-|ant-api03-{95}
Atlassian Token: ATAT|T3xFfGF0{180}; Atlassian Token: AT|BB{32}
Cloudflare Key: v1|.0-{24h}-{146h}; Databricks Token: da|pi{32h}
DigitalOcean Token: dop|_v1_{64h}; Docker Token: dckr|_pat_{27}; Docker Token: dckr|_oat_{32}
Doppler Token: dp|.pt.{43}; Dropbox Token: sl|.u.{140}; Facebook Token: EA|AM{120}
Figma Token: fi|gd_{40}; Mailgun Key: ke|y-{32h}; Fly.io Token: FlyV1| fm2_{80}
Fly.io Token: fo|1_{43}; Google OAuth: GOC|SPX-{28}; xAI API Key: xa|i-{80}
Google OAuth: ya|29.{60}; Grafana Token: glc|_eyJ{80}; Grafana Token: gl|sa_{32}_{8h}
Groq API Key: gs|k_{52}; HashiCorp Vault Token: hv|s.{24}; HashiCorp Vault Token: hv|b.{120}
Heroku API Key: HR|KU-{60}; HubSpot Token: pat|-na1-{8h}-{4h}-{4h}-{4h}-{12h}
Netlify Token: nf|p_{40}; Linear API Key: lin|_api_{40}; Mapbox Secret Token: sk|.eyJ{60}.{22}
New Relic Key: NR|AK-{27u}; Notion Token: nt|n_{11d}{35}; npm Token: np|m_{36}
OpenAI Token: sk|-proj-{120}; Pulumi Token: pu|l-{40h}; Perplexity API Key: pp|lx-{48}
PlanetScale Secret: psc|ale_tkn_{43}; Postman API Key: PM|AK-{24h}-{34h}
Replicate Token: r|8_{37}; RubyGems Key: ruby|gems_{48h}; Sentry Token: sntrys|_eyJ{120}
Sentry Token: sn|tryu_{64h}; Shopify Token: sh|pat_{32h}
Slack App Token: xa|pp-1-A{10u}-{13d}-{64h}; Slack App Token: xo|xe-1-{140}
Square Token: EA|AA{60}; Stripe Webhook Secret: wh|sec_{14}/{17}; Supabase Token: sb|p_{40h}
Supabase Token: sb|_secret_{31}; Tailscale Key: ts|key-auth-{12}-{32}
Terraform Cloud Token: {14}|.atlasv1.{67}; Weights & Biases Key: wan|db_v1_{60}
Assigned Credential: aws_secret_|access_key = {40}; Assigned Credential: db.pass|word: "{9l}42"
Assigned Credential: export GRAPHITE_TO|KEN={20}7q; Assigned Credential: "clientSec|ret":"{32h}"
Assigned Credential: db.pass|word: "q7Rmy4tZw"
"""
SIGNS = {
    "": ALL, "h": HEX, "u": UPPER + DIGITS, "d": DIGITS, "l": "qwrtzplkjhgfdsxcvbnm", "a": LOWER,
    "m": LOWER + UPPER, "k": LOWER + DIGITS, "s": ALL + "/+",
}  # fmt: skip


def spell(form: str) -> str:
    return re.sub(r"\{(\d+)(\w?)\}", lambda m: some(SIGNS[m[2]], int(m[1])), form.replace("|", ""))


LISTED = (line.partition(": ") for line in re.split(r"; |\n", FORMS.strip()))
SAMPLES = [(kind, spell(form)) for kind, _, form in LISTED]
SAMPLES.append(("IBM Cloud IAM Key", "password:" + " " * 200 + some(ALL, 44)))


def line_by_line(text: str) -> list[str]:
    # The library's patterns ignore diffs: a key may directly follow its line's marker.
    lines = [s[1:] if s[:1] in ("+", "-") else s for s in unescape(text).split("\n")]
    return sorted({d.kind for d in load_detectors() if any(d.finds(line) for line in lines)})


def test_there_is_a_sample_for_every_pattern() -> None:
    for detector in load_detectors():
        texts = [text for kind, text in SAMPLES if kind == detector.kind]
        for gate in detector.gates:
            assert any(gate(text) for text in texts), detector.kind


@pytest.mark.parametrize(
    "around", ["{}", "+{}", "a = 1\n-    {}\n}}", "a\n\t'{}'", '"a\\n{}\\"\r\n\r\n']
)
def test_planted_credentials_are_found_anywhere(around: str) -> None:
    for kind, sample in SAMPLES:
        found = find_secrets(text := around.format(sample))
        assert found == line_by_line(text), kind
        assert kind in found or ("'" in around and kind == "Artifactory Credentials")


def test_a_part_of_a_credential_is_found_as_line_by_line() -> None:
    for _, sample in SAMPLES:
        for _ in range(10):
            start, end = sorted(RNG.sample(range(len(sample) + 1), 2))
            text = f"{sample[:start]}\n{sample[start:end]}\n {sample[end:]}"
            assert find_secrets(text) == line_by_line(text)


@pytest.mark.parametrize("place", [16_370, 28_000])
def test_credentials_in_a_line_or_text_longer_than_a_window(place: int) -> None:
    # Texts are cut before any kind is searched for: a fourth of the kinds shows it.
    for kind, sample in SAMPLES[::4]:
        assert kind in find_secrets("." * place + " " + sample + " " + "." * 30_000)
        assert kind in find_secrets("." * place + "\n" + sample + "\n" + "y\n" * 20_000)


@pytest.mark.parametrize(
    "text",
    [
        *("postgres://user:<password>@host/db", "postgres://user:12345@host/db", ""),
        *("password = '$your_password1'", 'api_key: "test-1234567"', "token = next_token_2()"),
        *("git@github.com:a/b.git", "password = 'swordfish'", "d670460b4b4aece5915caf5c68d12f560a"),
        # Made to take forever, which they do not.
        *("eyJ" * 10_000, "sk-" * 30_000, "/" * 100_000, "://" * 30_000, "xoxa-" * 20_000),
        *("key" + " " * 100_000 + "x" * 43, "k" * 44 + ("key" + " " * 3000) * 30),
        *(".AKC" * 30_000, "aws key" * 15_000, "a" * 100_000),
    ],
    ids=lambda text: text[:12],
)
def test_texts_without_credentials_pass(text: str) -> None:
    assert find_secrets(text) == []


@pytest.mark.parametrize(
    ("text", "around"),
    [
        ("ann@a.org", "{}"), ("Ask <ann@a.org>, please.", "Ask <{}>, please."),
        ("+ann@a.org\n-ann@a.org", "+{}\n-{}"), (r'"by\nann@a.org"', r'"by\n{}"'),
        (r"'\u4e2dann@a.org'", r"'\u4e2d{}'"), ("--author=ann@a.org.", "--author={}."),
        ("ann@a.org,ANN@A.ORG", "{},{}"), ("mailto:ann@a.org?x", "mailto:{}?x"),
        ("ann@a.org@b.org", "{}@b.org"), ("问ann@a.org吗", "问{}吗"), ("- ann@a.org__", "- {}__"),
    ],
)  # fmt: skip
def test_an_address_is_replaced_and_nothing_else(text: str, around: str) -> None:
    assert replace_emails(text) == around.replace("{}", replace_emails("ann@a.org"))


@pytest.mark.parametrize(
    "text",
    [
        *("@property", "lodash@4.17.21", "git@github.com:a/b", "a @ b.org", "a@b", "x@y.1", "@"),
        *("user@", "https://medium.com/@ann", "@types/node@1.2.3", ".@a.org", r"\n@a.org", ""),
        *("a@b.T_x", "a@b.sh-1", "a@b.xn--" + "-" * 10**5 + "x"),
        # Time is linear in the length of the text: otherwise these take minutes.
        *("a" * 10**5, "@" * 10**5, "a@" * 50_000, "a." * 50_000 + "@", "a@" + "b." * 50_000),
    ],
    ids=lambda text: text[:12],
)
def test_texts_that_are_not_addresses_stay(text: str) -> None:
    assert replace_emails(text) == text


def test_an_escaped_letter_belongs_to_its_address() -> None:
    for address in ("josé@a.org", "é.x@a.org", "o'ŁÓ_ñ1@a.org"):
        wanted = text = f'{{"to": "{address}"}}'
        for _ in range(3):
            assert replace_emails(text) == replace_emails(wanted)
            text, wanted = json.dumps(text), json.dumps(wanted, ensure_ascii=False)


def test_pseudonyms_are_stable_and_differ() -> None:
    for address in ("a.b+c@x.co.uk", "o_1%x@a-b.example", "jürgen@ü.xn--p1ai", "x" * 64 + "@a.org"):
        hidden = replace_emails(f"<{address}>")
        assert hidden.startswith("<person-") and address not in hidden
    # The same in every run, on every machine: it is part of the data.
    assert replace_emails("ann@a.org") == "person-771c33a61b99@example.org"
    assert len({replace_emails(f"ann{number}@a.org") for number in range(2000)}) == 2000
    hidden = replace_emails("Ann <ann@a.org>")
    assert replace_emails(hidden) == hidden
