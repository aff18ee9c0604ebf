"""Secrets do not get into evidence: command lines go into reports and logs."""

import itertools
import os
import subprocess
import time

import pytest

from holdfast.system import procfs, secret_patterns
from holdfast.system.redact import mask
from tests.conftest import until


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("train --password hunter2 --epochs 3", "train --password *** --epochs 3"),
        ("train --password=hunter2 x", "train --password=*** x"),
        ("train --db-password 'a b' x", "train --db-password *** x"),
        ("env API_KEY=abc123 python train.py", "env API_KEY=*** python train.py"),
        ("java -Dspark.authenticate.secret=s3cr3t Main", "java -Dspark.authenticate.secret=*** Main"),
        ("serve --token abc --port 80", "serve --token *** --port 80"),
        ("run key=abc mode=fast", "run key=*** mode=fast"),
        ("git clone https://me:hunter2@host/x.git", "git clone https://***@host/x.git"),
        ("fetch s3://ABC@bucket/x", "fetch s3://***@bucket/x"),
        ("curl -H Authorization: Bearer abcdefghijkl https://host", "curl -H Authorization: Bearer *** https://host"),
        ("get https://host/x?token=abc&page=2", "get https://host/x?token=***&page=2"),
        ('run --env {"AWS_SECRET": "x", "HOME": "/root"}', 'run --env {"AWS_SECRET": ***, "HOME": "/root"}'),
        ("get https://host/x?sig=abc&page=2", "get https://host/x?sig=***&page=2"),
    ],
)
def test_secrets_are_masked(command, shown):
    assert mask(command) == shown


@pytest.mark.parametrize(
    "command",
    [
        "/usr/sbin/slurmstepd: [1234.0]",
        "python train.py --monkey x --keys-only --author me --tokens 512 --tokenizer gpt2",
        "bash -c kill 4711; sleep 0.3",
        "java -cp a:b org.apache.spark.executor.CoarseGrainedExecutorBackend --driver-url spark://Driver@host:1",
    ],
)
def test_what_is_no_secret_stays(command):
    assert mask(command) == command.replace("spark://Driver@", "spark://***@")


# A command, and its secret; a row for each way to give one.
LEAKS = [
    ("mysql -uroot -phunter2 db", "hunter2"),
    ("mysqldump -psecretword db", "secretword"),
    ("mysql -u root -psecret", "secret"),
    ("mysql -p'my secret' db", "secret"),
    ("mongosh --host h -pmytoken", "mytoken"),
    ("/opt/bin/train -phunter2", "hunter2"),
    ("sshpass -p x ssh host", " x "),
    ("sshpass -px7 ssh host", "x7"),
    ("curl -u u:pw https://host", "u:pw"),
    ("curl -uu:pw https://host", "u:pw"),
    ("curl -sSu u:pw https://host", "u:pw"),
    ("curl --user u:pw https://host", "u:pw"),
    ("curl --user=u:pw https://host", "u:pw"),
    ("curl -u 'u: my pw' https://host", "my"),
    ("curl -b session=abc https://host", "session=abc"),
    ("train --wandb-key x7", "x7"),
    ("train --wandb_key=x7", "x7"),
    ("train --apiKey x7", "x7"),
    ("train --api-key='a b7' x", "b7"),
    ("train --bearer x7", "x7"),
    ("env GITHUB_PAT=x7 git fetch", "x7"),
    ('python -c import os; os.environ["WANDB_API_KEY"]="x7"', "x7"),
    ("train wandb.key=x7", "x7"),
    ("env OPENAI_KEY=sk-abc python train.py", "abc"),
    ("env OPENAI_KEY=a,b;c&d python train.py", "d "),
    ("env MYSQL_PWD=x7 mysql", "x7"),
    ("env PGPASSWORD=x7 psql", "x7"),
    ("curl -H 'Authorization: token ghp_abc' https://host", "ghp_abc"),
    ("curl -H 'Authorization: abc' https://host", " abc"),
    ("curl -H Authorization:Basic dTpw https://host", "dTpw"),
    ("curl -H 'X-Api-Key: abc' https://host", " abc"),
    ("curl -H 'Cookie: a=b7; c=d7' https://host", "7"),
    ("redis-cli -h host -a x7 ping", "x7"),
    ("mongodump -u me -p x7 --db d", "x7"),
    ("ldapsearch -x -w x7 -b dc=a", "x7"),
    ("smbclient //host/x -U me%x7", "x7"),
    ("sqlcmd -S host -P x7", "x7"),
    ("zip -rP x7 a.zip a", "x7"),
    ("7z x -px7 a.7z", "x7"),
    ("openssl enc -aes256 -k x7 -in a", "x7"),
    ("openssl rsa -passin pass:x7 -in a", "x7"),
    ("docker login -u me -p x7 host", "x7"),
    ("bash -c 'echo; docker login -px7'", "x7"),
    ("wandb login 0a1b2c", "0a1b2c"),
    ("vault login s.x7", "x7"),
    ("twine upload -u me -p x7 a.whl", "x7"),
    ("ssh-keygen -t ed25519 -N x7 -f key", "x7"),
    ("ipmitool -H host -U me -P x7 power", "x7"),
    ("psql postgres://me:p@ss7@host/db", "ss7"),
    ("az --connection DefaultEndpointsProtocol=https;AccountName=a;AccountKey=x7==;B=c", "x7"),
    ("get 'https://host/x?X-Amz-Credential=x7&X-Amz-Signature=y7'", "7"),
    ("get https://host/x?sv=1&sig=a%2Fb7", "b7"),
    ("Authorization: OAuth x7", "x7"),
    ("curl -H 'Authorization: OAuth x7' https://host", "x7"),
    ("curl -H 'Authorization: Klingon x7' https://host", "x7"),
    ("curl --header=Authorization:OAuth x7", "x7"),
    ("curl -HAuthorization: token x7 https://host", "x7"),
    ("curl -HAuthorization: x7 https://host", "x7"),
    ("curl '-HAuthorization: token x7' https://host", "x7"),
    ("curl -H'Authorization: token x7' https://host", "x7"),
    ('curl -H"Proxy-Authorization: Klingon x7" https://host', "x7"),
    ("curl -HCookie: a=x7", "x7"),
    ("curl\0-HAuthorization: Klingon x7 y8\0https://host", "7 y8"),
    ("curl\0--header=Authorization: Klingon x7\0https://host", "x7"),
    ("python -c h['Authorization'] = 'Klingon x7'", "x7"),
    ("bash -c 'echo x|sshpass -p hunter2 ssh h'", "hunter2"),
    ("bash -c 'echo x | sshpass -p hunter2 ssh h'", "hunter2"),
    ("bash -c 'X=$(curl -u u:pw http://h)'", "u:pw"),
    ("bash -c X=$(curl -u u:pw http://h)", "u:pw"),
    ("bash\0-c\0X=$(curl -u u:pw http://h)", "u:pw"),
    ("bash -c 'X=\"$(curl -u u:pw http://h)\"'", "u:pw"),
    ("bash -c 'X=`curl -u u:pw http://h`'", "u:pw"),
    ("bash -c '(curl -u u:pw http://h)'", "u:pw"),
    ("bash -c 'true&&curl -u u:pw http://h'", "u:pw"),
    ("bash -c 'true;/usr/bin/curl -u u:pw http://h'", "u:pw"),
    ("bash -c 'X=$(mysql -px7)'", "x7"),
    ("bash -c 'mysql -psecret; ls'", "secret"),
    ("bash -c 'wandb login x7; ls'", "x7"),
    ("bash -c 'wandb login x7;curl -s h'", "x7"),
    ("bash -c 'curl -u a:b;mysql -px7'", "x7"),
    ("curl -H $(vault read x) -u u:pw http://h", "u:pw"),
    ("curl -H `vault read x` -u u:pw http://h", "u:pw"),
    ("python -c password = 'x7'", "x7"),
    ("train password = x7", "x7"),
    ("train password ='x7'", "x7"),
    ("train password= 'x7'", "x7"),
    ("train password => 'x7'", "x7"),
    ("python -c if password == 'x7': pass", "x7"),
    ("python -c os.environ['TOKEN'] = 'x7'", "x7"),
    ('run {"openai_key" : "x7"}', "x7"),
    ("run {'token' : 'x7', 'a': 1}", "x7"),
    ("run {'token': 'x\\'y7'}", "y7"),
    ("run password: x7", "x7"),
    ("train --authkey=x7", "x7"),
    ("tailscale up --authkey x7", "x7"),
    ("curl -sLuu:pw https://host", "u:pw"),
    ("curl -sLu u:pw https://host", "u:pw"),
    ("curl -fsSLku u:pw https://host", "u:pw"),
    ("mysql -Nsphunter db", "hunter"),
    ("ldapsearch -xwx7 -b dc=a", "wx7"),
    ("skopeo copy --src-creds u:pw docker://a docker://b", "u:pw"),
    ("skopeo copy --dest-creds=u:pw docker://a docker://b", "u:pw"),
    ("skopeo inspect --creds u:pw docker://a", "u:pw"),
    ("aws configure set aws_secret_access_key x7", "x7"),
    ("aws configure set profile.a.aws_session_token x7", "x7"),
    ("npm config set //registry.npmjs.org/:_authToken x7", "x7"),
    ("redis-cli config set requirepass x7", "x7"),
    ("rclone config create a s3 secret_access_key x7", "x7"),
    ("huggingface-cli login --token x7", "x7"),
    ("bash -c 'export PGPASSWORD=x7 && psql'", "x7"),
    ("export WANDB_API_KEY='a x7'; python train.py", "x7"),
    ("git clone https://me:x7@host/a.git", "x7"),
    ("bash -c 'echo -n x7 | docker login --password-stdin h'", "x7"),
    ("bash -c 'printf %s \"x7\"|gh auth login --with-token'", "x7"),
    ("sign -----BEGIN RSA PRIVATE KEY----- MIIx7 -----END RSA PRIVATE KEY----- now", "MIIx7"),
]


@pytest.mark.parametrize(("command", "secret"), LEAKS, ids=[command[:30] for command, _ in LEAKS])
def test_each_way_to_give_a_secret_is_known(command, secret):
    """The secret is gone, the program is still there."""
    shown = mask(command)
    assert secret.strip() in command and secret not in shown
    assert shown.startswith(command.split("\0")[0].split()[0])
    assert "***" in shown
    assert mask(shown) == shown


TOKENS = [
    (whose, begin, letters, least)
    for whose, begins, letters, least in secret_patterns.TOKENS
    for begin in begins.split()
]


@pytest.mark.parametrize(("whose", "begin", "letters", "least"), TOKENS, ids=[begin for _, begin, _, _ in TOKENS])
def test_each_kind_of_token_is_known(whose, begin, letters, least):
    """Wherever it stands; and its beginning alone is a word like any other."""
    some = {"HEX": "0a9f", "UPPER": "A7BZ"}
    alphabet = next((some[name] for name in some if getattr(secret_patterns, name) == letters), "aB3x")
    token = begin + "".join(itertools.islice(itertools.cycle(alphabet), least))
    for place in ("push {}", "push {} now", "X={}", "'{}'", "https://host/{}/x", "--name={}"):
        assert token not in mask(place.format(token)), whose
    assert mask(f"push {begin} now") == f"push {begin} now"


@pytest.mark.parametrize(
    "command",
    [
        "serve -p 8080 --batch-size 64",
        "nmap -p80,443 -p8080 host",
        "docker run -p 8080:80 -p9090:90/tcp image",
        "make -pthread -j8",
        "gcc -pipe -pedantic -pthread -O2 a.c",
        "mysql -p db",
        "find /data -path */x -prune -o -print0",
        "ffmpeg -preset p4 -pix_fmt yuv420p a.mp4",
        "mkdir -p /data/run-2024-01-01/a1b2c3",
        "ssh -p 22 host",
        "git checkout 3f786850e387550fdab836ed7e6dc881de23001b",
        "git push origin feature/monkey-patch",
        "docker pull image@sha256:3f786850e387550fdab836ed7e6dc881de23001b89eb4a2d8d4f3f6f8a0c6b1d",
        "python -u /opt/venv/lib/python3.11/site-packages/torch/bin/torchrun --nproc-per-node 8 train.py",
        "python train.py --max-token 512 --eos_token </s> --pad_token 0 --img-key jpg --sort-key name",
        "python train.py --data s3://bucket/train-{000000..000999}.tar --name exp-0012_sk-learn-baseline",
        "python -c from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5, pipe_handle=7)",
        "env PWD=/root OLDPWD=/tmp PATH=/usr/bin:/bin HOME=/root python x.py",
        "rsync -avz --progress host:/a/b /c",
        "sort --key 2 /etc/passwd",
        "curl -X POST -d a=b https://host:8080/path",
        "ray::train(actor_id=0123456789abcdef0123456789abcdef)",
        "wandb sync --project p",
        "grep -rn password src",
        "bash -c 'X=$(curl -s http://h) python -u train.py'",
        "bash -c 'X=`curl -s http://h` python -u train.py'",
        "bash -c '(curl -s http://h); python -u train.py'",
        "bash -c 'for i in $(seq 3); do echo \"$i\"; done | sort -u out.txt'",
        "bash -c '[ $n = 3 ] && python -u train.py'",
        "bash -c 'a=$((1+2)); case $a in 3) python -u x.py;; esac'",
        "env TOKEN= python train.py",
        "python -c if token == eos: stop(token)",
        "python -c token = tokenizer.decode(3)",
        "python -c key = 3; d = {'key' : 'x', 'sort_key' : 'y'}",
        "awk {if (key == 3) print} /etc/passwd",
        "curl -sLo out.bin https://host/u/x",
        "curl -fsSLO https://host/bundle.tar",
        "curl -sLd u:pw https://host",
        "curl -H 'Accept: text/html' https://host",
        "grep -n Authorization access.log",
        "aws configure set region eu-west-1",
        "aws s3 cp s3://bucket/a.txt .",
        "npm config set registry https://registry.npmjs.org/",
        "python train.py --creds-from-env --author-key-count 3",
        "bash -c 'echo start | tee log; docker load --input a.tar'",
        "tar -xpf archive.tar.gz -C /tmp",
    ],
)
def test_ordinary_commands_are_shown_whole(command):
    """Ports, paths, hashes and the words of machine learning are no secrets."""
    assert mask(command) == command


def test_an_argument_is_hidden_whole():
    """The kernel divides arguments by NUL: spaces and quotes inside one belong to the secret."""
    words = ["sshpass", "-p", 'it\'s my "own"', "curl", "-u", "me:a b", "--password", "c d", "--keep", "e f"]
    assert mask("\0".join(words)) == "sshpass -p *** curl -u *** --password *** --keep e f"


HOSTILE = [
    *("a-", "a.b=a:", "\"'", "--token '", "password", "Authorization: ", "cookie:a;", "-----BEGIN PRIVATE KEY-----"),
    *("eyJ", "a@", "://", "\0", "-p1a", " ", "=", ":'", "a_", "ghp_", "-", "aA", "curl -u ", "Bearer ", "\n", "xoxb-1"),
]


@pytest.mark.parametrize("piece", HOSTILE, ids=repr)
@pytest.mark.parametrize("before", ["", "x://", 'token="', "-p"])
def test_no_line_takes_long(piece, before):
    """100 kB of what might make a pattern go back again and again: a second would be a hundred times too long."""
    line = before + piece * (100_000 // len(piece))
    began = time.process_time()
    shown = mask(line)
    assert time.process_time() - began < 1
    assert len(shown) < 20_000


@pytest.mark.parametrize(
    "piece", [*HOSTILE, "(", ")", "`", "$(curl ", "-sLu", "-p", '"', "'", "password = '", "= ", "echo a|", "echo "]
)
def test_a_megabyte_takes_no_longer(piece):
    """Half a second would be fifty times too long."""
    line = piece * (1_000_000 // len(piece))
    began = time.process_time()
    mask(line)
    mask("curl\0-u\0'" + line)
    assert time.process_time() - began < 0.5


def test_of_a_real_process():
    with (
        subprocess.Popen(["sleep", "30"], env={}) as plain,
        subprocess.Popen(["bash", "-c", "read x", "--password", "hunter2"], stdin=subprocess.PIPE) as other,
    ):
        until(lambda: procfs.command(plain.pid) and procfs.command(other.pid), "they did not start")
        assert procfs.command(plain.pid) == "sleep 30"
        assert procfs.command(other.pid) == "bash -c read x --password ***"
        assert (other.pid, "bash -c read x --password ***") in procfs.children(os.getpid())
        plain.kill()
        other.kill()
