"""Declare patterns for the credentials that detect-secrets does not detect.

Each pattern comes with fixed text that any match contains: a text without it is not searched.
Prefixes are those that providers publish. Long values follow, so that prose does not match.
"""

import re

_HEX, _WORD = "0-9a-f", "-0-9A-Za-z_"
# One of these precedes, ignoring case, every value that ASSIGNED finds.
NAMES = (
    *("passw", "passphrase", "pwd", "secret", "token", "api_key", "api-key", "apikey"),
    *("access_key", "access-key", "accesskey", "private_key", "private-key", "privatekey"),
)
# Kind -> (fixed text, pattern) of credentials that no other text looks like.
KINDS: dict[str, tuple[tuple[str, str], ...]] = {
    "1Password Token": (("ops_eyJ", r"ops_eyJ[0-9A-Za-z+/=]{250,}"),),
    "Adobe Client Secret": (("p8e-", r"\bp8e-[0-9A-Za-z]{32}\b"),),
    "Age Secret Key": (("AGE-SECRET-KEY-1", r"AGE-SECRET-KEY-1[0-9A-Z]{58}"),),
    "Airtable Token": (("pat", rf"\bpat[0-9A-Za-z]{{14}}\.[{_HEX}]{{64}}\b"),),
    "Alibaba Cloud Key": (("LTAI", r"\bLTAI[0-9A-Za-z]{20}\b"),),
    "Anthropic API Key": (("sk-ant-", rf"sk-ant-(?:api|admin|oat)\d\d-[{_WORD}]{{80,}}"),),
    "Atlassian Token": (
        ("ATATT3", rf"ATATT3[{_WORD}=]{{60,}}"),
        ("ATBB", r"\bATBB[0-9A-Za-z]{28,}\b"),
    ),
    "Azure Client Secret": (("Q~", r"(?<![0-9A-Za-z_~.])[\w~.]{3}\dQ~[\w~.-]{31,34}"),),
    "Cloudflare Key": (("v1.0-", rf"\bv1\.0-[{_HEX}]{{24}}-[{_HEX}]{{146}}\b"),),
    "Databricks Token": (("dapi", rf"\bdapi[{_HEX}]{{32}}(?:-\d)?\b"),),
    "DigitalOcean Token": (("_v1_", rf"\bdo[por]_v1_[{_HEX}]{{64}}\b"),),
    "Docker Token": (
        ("dckr_pat_", rf"dckr_pat_[{_WORD}]{{27}}"),
        ("dckr_oat_", rf"dckr_oat_[{_WORD}]{{32}}"),
    ),
    "Doppler Token": (("dp.", r"\bdp\.(?:pt|st|ct|sa|scim|audit)\.[0-9A-Za-z.]{40,}"),),
    "Dropbox Token": (("sl.", rf"\bsl\.(?:u\.)?[{_WORD}=]{{130,}}"),),
    "Facebook Token": (("EAA", r"\bEAA[MC][0-9A-Za-z]{100,}\b"),),
    "Figma Token": (("figd_", rf"\bfigd_[{_WORD}]{{38,}}"),),
    "Fly.io Token": (
        ("FlyV1 fm", r"FlyV1 fm\d_[0-9A-Za-z+/=]{60,}"),
        ("fo1_", r"\bfo1_[\w-]{43}\b"),
    ),
    "GitHub Token": (("github_pat_", r"github_pat_[0-9A-Za-z_]{82}"),),
    "GitLab Token": (("glpat-", rf"glpat-[{_WORD}]{{27,300}}\.[0-9a-z]{{9}}"),),
    "Google API Key": (("AIza", rf"AIza[{_WORD}]{{35}}(?![{_WORD}])"),),
    "Google OAuth": (
        ("GOCSPX-", rf"GOCSPX-[{_WORD}]{{28}}"),
        ("ya29.", rf"\bya29\.[{_WORD}]{{30,}}"),
    ),
    "Grafana Token": (
        ("glc_eyJ", r"glc_eyJ[0-9A-Za-z+/=]{60,}"),
        ("glsa_", rf"glsa_[0-9A-Za-z]{{32}}_[{_HEX}]{{8}}"),
    ),
    "Groq API Key": (("gsk_", r"\bgsk_[0-9A-Za-z]{52}\b"),),
    "HashiCorp Vault Token": (
        ("hvs.", rf"\bhvs\.[{_WORD}]{{24,}}"),
        ("hvb.", rf"\bhvb\.[{_WORD}]{{100,}}"),
    ),
    "Heroku API Key": (("HRKU-", rf"HRKU-[{_WORD}]{{36,}}"),),
    "HubSpot Token": (("pat-", rf"\bpat-(?:na|eu)\d-[{_HEX}]{{8}}(?:-[{_HEX}]{{4,12}}){{4}}"),),
    "Hugging Face Token": (("hf_", r"hf_[A-Za-z]{34}(?![0-9A-Za-z])"),),
    "Linear API Key": (("lin_", r"\blin_(?:api|oauth)_[0-9A-Za-z]{40,64}\b"),),
    "Mailgun Key": (("key-", rf"\bkey-[{_HEX}]{{32}}\b"),),
    "Mapbox Secret Token": (("sk.eyJ", rf"\bsk\.eyJ[{_WORD}]{{40,}}\.[{_WORD}]{{20,}}"),),
    "Netlify Token": (("nfp_", r"\bnfp_[0-9A-Za-z]{36,}\b"),),
    "New Relic Key": (("NRAK-", r"NRAK-[0-9A-Z]{27}"),),
    "Notion Token": (("ntn_", r"\bntn_\d{11}[0-9A-Za-z]{35}\b"),),
    "npm Token": (("npm_", r"\bnpm_[0-9A-Za-z]{36}\b"),),
    "OpenAI Token": (("sk-", rf"\bsk-(?:proj|svcacct|admin)-[{_WORD}]{{58,}}"),),
    "Perplexity API Key": (("pplx-", r"\bpplx-[0-9A-Za-z]{48}\b"),),
    "PlanetScale Secret": (("pscale_", r"\bpscale_(?:tkn|pw|oauth)_[\w=.-]{32,}"),),
    "Postman API Key": (("PMAK-", rf"PMAK-[{_HEX}]{{24}}-[{_HEX}]{{34}}"),),
    "Private Key": (
        ("BEGIN ENCRYPTED PRIVATE KEY", "BEGIN ENCRYPTED PRIVATE KEY"),
        ("PuTTY-User-Key-File-3", "PuTTY-User-Key-File-3"),
    ),
    "Pulumi Token": (("pul-", rf"\bpul-[{_HEX}]{{40}}\b"),),
    "Replicate Token": (("r8_", r"\br8_[0-9A-Za-z]{37}\b"),),
    "RubyGems Key": (("rubygems_", rf"rubygems_[{_HEX}]{{48}}"),),
    "Sentry Token": (
        ("sntrys_eyJ", r"sntrys_eyJ[0-9A-Za-z+/=_]{80,}"),
        ("sntryu_", rf"sntryu_[{_HEX}]{{64}}"),
    ),
    "Shopify Token": (("shp", rf"\bshp(?:at|ca|pa|ss|tka)_[{_HEX}]{{32}}\b"),),
    "Slack App Token": (
        ("xapp-", r"\bxapp-\d-[0-9A-Z]+-\d+-[0-9a-z]{20,}"),
        ("xoxe", r"\bxoxe(?:\.xox[bp])?-\d-[0-9A-Za-z]{100,}"),
    ),
    "Square Token": (("EAAA", rf"\bEAAA[{_WORD}]{{60}}(?![{_WORD}])"),),
    "Stripe Webhook Secret": (("whsec_", r"\bwhsec_[0-9A-Za-z+/=]{32,}"),),
    "Supabase Token": (("sb", rf"\bsb(?:p_[{_HEX}]{{40}}|_secret_[{_WORD}]{{22,}})"),),
    "Tailscale Key": (("tskey-", r"\btskey-[a-z]+-[0-9A-Za-z]+-[0-9A-Za-z]{20,}"),),
    "Terraform Cloud Token": ((".atlasv1.", rf"\b[0-9A-Za-z]{{14}}\.atlasv1\.[{_WORD}=]{{60,}}"),),
    "Weights & Biases Key": (("wandb_v1_", r"\bwandb_v1_\w{40,}"),),
    "xAI API Key": (("xai-", r"\bxai-[0-9A-Za-z]{80}\b"),),
}  # fmt: skip
# A setting named like a credential, with its value, quoted or not.
ASSIGNED = re.compile(
    r"""(?ix)(?:passw(?:or)?d|passphrase|pwd|secret|token|(?:api|access|private)[_-]?key)
    [\w-]{0,24}["']?\s{0,4}(?::=|=>|[:=])\s{0,4}
    (?:(["'])(?P<quoted>[^"'\s]{8,128})\1|(?P<bare>[-0-9A-Za-z/+=_]{12,128})(?=["'`\s]|$))"""
)
# Placeholder values: templates, and short ones with a telltale word.
PLACEHOLDER = re.compile(
    r"""(?ix)[<>{}()\[\]|\\*]|^[$%@]|\.\.|https?:|^[\w.-]*\.[a-z]{2,4}$|^(?=.{1,24}$).*(?:example
    |sample|dummy|placeholder|redacted|change|your|my|test|foo|bar|abc|123|xxx|pass|secret|token|key
    |demo|fake|none|null)"""
)
