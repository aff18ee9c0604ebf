"""What secrets look like on a command line: data for redact.py, and nothing else.

The tokens are facts from two public, well-kept sets of rules, written down anew: how a service's secrets begin, of
which letters they are, how many.
  gitleaks, config/gitleaks.toml at b58d3f102cf3, MIT, https://github.com/gitleaks/gitleaks
  detect-secrets, plugins/ at 5e141933554a, Apache-2.0, https://github.com/Yelp/detect-secrets
The names of variables and options follow detect-secrets' keyword plugin, and are our own beyond that. The options of
programs are from their manual pages.

To add a row: a beginning that nothing else has, and the number of letters below which it may be an ordinary word. A
command line may be cut inside a token, so fewer will do than are issued, where the beginning speaks for itself.

A module and not a file that is read: when evidence is taken, this process may be out of descriptors.
"""

HEX = "[0-9A-Fa-f]"
UPPER = "[0-9A-Z]"
LETTERS = "[0-9A-Za-z]"
WORD = "[0-9A-Za-z_-]"
DOTTED = "[0-9A-Za-z._=-]"
BASE64 = "[0-9A-Za-z+/=_-]"

# (whose, how they begin, of which letters they go on, how many of those at least)
TOKENS: tuple[tuple[str, str, str, int], ...] = (
    ("1Password", "ops_eyJ", BASE64, 16),
    ("Adobe", "p8e-", LETTERS, 32),
    ("age", "AGE-SECRET-KEY-1", LETTERS, 16),
    ("Airtable", "pat", DOTTED, 79),
    ("Alibaba", "LTAI", LETTERS, 20),
    ("Anthropic", "sk-ant-", WORD, 16),
    ("Artifactory", "AKCp cmVmd", LETTERS, 59),
    ("AWS", "AKIA ASIA ABIA ACCA A3T", UPPER, 16),
    ("AWS Bedrock", "ABSK", BASE64, 109),
    ("AWS Bedrock", "bedrock-api-key-", BASE64, 16),
    ("ClickHouse", "4b1d", LETTERS, 38),
    ("Clojars", "CLOJARS_", LETTERS, 16),
    ("Cloudflare", "v1.0-", HEX, 24),
    ("Databricks", "dapi", HEX, 32),
    ("DigitalOcean", "doo_v1_ dop_v1_ dor_v1_", HEX, 16),
    ("Doppler", "dp.pt.", LETTERS, 16),
    ("Duffel", "duffel_test_ duffel_live_", WORD, 16),
    ("Dynatrace", "dt0c01.", DOTTED, 16),
    ("EasyPost", "EZAK EZTK", LETTERS, 54),
    ("Facebook", "EAAC EAAM", LETTERS, 100),
    ("Flutterwave", "FLWSECK_TEST-", WORD, 12),
    ("Fly.io", "fo1_ fm1a_ fm1r_ fm2_", BASE64, 20),
    ("Frame.io", "fio-u-", WORD, 16),
    ("GitHub", "ghp_ gho_ ghu_ ghs_ ghr_", LETTERS, 16),
    ("GitHub", "github_pat_", WORD, 16),
    ("GitLab", "glpat- gldt- glft- glffct- glimt- glagent- gloas- glptt- glrt- glcbt- glsoat-", DOTTED, 16),
    ("GitLab", "GR1348941", WORD, 20),
    ("Google", "AIza", WORD, 35),
    ("Grafana", "glc_ glsa_", BASE64, 20),
    ("Harness", "pat. sat.", DOTTED, 66),
    ("HashiCorp Terraform", "atlasv1.", DOTTED, 60),
    ("HashiCorp Vault", "hvs. hvb.", WORD, 20),
    ("Heroku", "HRKU-AA", WORD, 16),
    ("Hugging Face", "hf_ api_org_", LETTERS, 20),
    ("Infracost", "ico-", LETTERS, 32),
    ("JSON Web Token", "eyJ", DOTTED, 20),
    ("Linear", "lin_api_", LETTERS, 16),
    ("Notion", "ntn_", LETTERS, 20),
    ("npm", "npm_", LETTERS, 20),
    ("Octopus Deploy", "API-", UPPER, 26),
    ("OpenAI", "sk-", LETTERS, 20),
    ("OpenAI", "sk-proj- sk-svcacct- sk-admin-", WORD, 16),
    ("OpenShift", "sha256~", WORD, 43),
    ("Perplexity", "pplx-", LETTERS, 20),
    ("PlanetScale", "pscale_tkn_ pscale_oauth_ pscale_pw_", DOTTED, 16),
    ("Postman", "PMAK-", WORD, 20),
    ("Prefect", "pnu_", LETTERS, 20),
    ("Pulumi", "pul-", HEX, 40),
    ("PyPI", "pypi-AgE", WORD, 16),
    ("ReadMe", "rdme_", LETTERS, 20),
    ("RubyGems", "rubygems_", HEX, 16),
    ("Scalingo", "tk-us-", WORD, 48),
    ("SendGrid", "SG.", DOTTED, 40),
    ("Sendinblue", "xkeysib-", WORD, 16),
    ("Sentry", "sntrys_ sntryu_", BASE64, 16),
    ("SettleMint", "sm_aat_ sm_pat_ sm_sat_", LETTERS, 16),
    ("Shippo", "shippo_live_ shippo_test_", HEX, 16),
    ("Shopify", "shpat_ shpca_ shppa_ shpss_", HEX, 16),
    ("Slack", "xoxa- xoxb- xoxe- xoxe. xoxo- xoxp- xoxr- xoxs- xapp-", DOTTED, 10),
    ("Slack", "hooks.slack.com/services/ hooks.slack.com/workflows/ hooks.slack.com/triggers/", BASE64, 20),
    ("Sourcegraph", "sgp_", WORD, 40),
    ("Square", "sq0atp- sq0csp-", WORD, 16),
    ("Square", "EAAA", WORD, 56),
    ("Stripe", "sk_live_ sk_test_ sk_prod_ rk_live_ rk_test_ rk_prod_", LETTERS, 10),
    ("Twilio", "AC SK", HEX, 32),
)

# A name is compared in small letters, with dashes for underscores, dots and changes from small to large letters.
# Names of secrets end so,
NAMES = (
    *("password", "passwd", "passphrase", "passcode", "keypass", "storepass", "dbpass", "token", "secret"),
    *("credential", "credentials", "apikey", "accesskey", "secretkey", "privatekey", "authkey", "contrasena"),
)
# or in one of these as a word of its own.
WORDS = ("key", "pass", "pwd", "pat", "auth", "bearer", "signature", "creds")
# But these end so too, and are no secrets: columns of data and databases, pieces of text.
HARMLESS = (
    *("sort-key", "primary-key", "foreign-key", "partition-key", "group-key", "cache-key", "index-key", "hot-key"),
    *("public-key", "host-key", "dict-key", "image-key", "img-key", "caption-key", "text-key", "label-key"),
    *("input-key", "output-key", "target-key", "feature-key", "field-key", "join-key", "order-key"),
    *("bos-token", "eos-token", "pad-token", "unk-token", "sep-token", "cls-token", "mask-token", "image-token"),
    *("special-token", "stop-token", "start-token", "end-token", "max-token", "num-token", "per-token", "next-token"),
)
# Parameters of an address that are secrets under so short a name.
PARAMETERS = ("key", "sig")

# What stands between "Authorization:" and the secret.
SCHEMES = (
    *("bearer", "basic", "token", "digest", "negotiate", "api-key", "apikey", "key", "oauth", "dpop", "gnap", "hoba"),
    *(
        "privatetoken",
        "scram-sha-1",
        "scram-sha-256",
        "vapid",
        "aws4-hmac-sha256",
        "hmac",
        "ntlm",
        "hawk",
        "mac",
        "jwt",
    ),
    *("ssws", "geniekey", "bot", "splunk", "sharedkey", "sharedkeylite", "accesskey", "kakaoak", "zoho-oauthtoken"),
)

# (programs, options or words whose next word is a secret, options that a secret is glued to, letters of options
# without a value that may stand before that letter)
OPTIONS: tuple[tuple[str, str, str] | tuple[str, str, str, str], ...] = (
    ("sshpass", "-p", "-p"),
    (
        *("curl", "-u --user -U --proxy-user --oauth2-bearer --pass --proxy-pass -b --cookie", "-u -U -b"),
        "0123456#:BGIJLMNORSZafgijklnpqsv",
    ),
    ("http", "-a", "-a"),
    (
        "mysql mysqldump mysqladmin mysqlimport mysqlcheck mysqlsh mariadb mariadb-dump mariadb-admin",
        "",
        "-p",
        "ABCEGHILNVWXbcfinqrstv",
    ),
    ("mongo mongosh mongodump mongorestore mongoexport mongoimport", "-p", "-p"),
    ("redis-cli", "-a --pass requirepass masterauth", ""),
    ("ldapsearch ldapadd ldapmodify ldapdelete ldapwhoami ldappasswd", "-w", "-w", "ALMPQRZcnruvx"),
    ("smbclient rpcclient", "-U --user", "-U"),
    ("lftp", "-u", "-u"),
    ("sqlcmd bcp osql", "-P", "-P"),
    ("zip unzip", "-P", "-P"),
    ("7z 7za 7zr 7zz rar unrar", "", "-p"),
    ("openssl", "-k -K -pass -passin -passout", ""),
    ("ipmitool", "-P", "-P"),
    ("snmpget snmpset snmpwalk snmpbulkwalk", "-c -A -X", "-c -A -X"),
    ("rdesktop", "-p", "-p"),
    ("plink pscp psftp putty", "-pw", ""),
    ("nmcli", "password", ""),
    ("aws", "aws_secret_access_key aws_session_token aws_access_key_id", ""),
    ("rclone", "secret_access_key pass password token client_secret", ""),
    ("npm yarn pnpm", "_authToken _auth _password", ""),
    ("twine", "-p", "-p"),
    ("ssh-keygen", "-N -P", ""),
)
# The same for their command "login", and "*" for a word that is no option.
LOGINS: tuple[tuple[str, str, str], ...] = (
    ("docker podman buildah skopeo nerdctl oras helm az oc cf", "-p", "-p"),
    ("wandb vault", "*", ""),
)

# "-phunter2": a password of any program, for it has letters and figures; but not where it begins like these words.
NO_PASSWORDS = (
    *("-pa", "-pc", "-phase", "-pi", "-plan", "-pol", "-poo", "-pop", "-por", "-pos", "-pow", "-pr", "-pthread", "-py"),
)
