#!/usr/bin/env python3
"""scripts/convert_olmo.py: converts small checkpoints in OLMo's own format; ./train --load_path must compute the same loss. The
test defines OLMo's model itself, in plain Python [olmo/model.py of ai2-olmo 0.6.0]."""
import array, base64, json, math, os, pickle, random, shlex, shutil, struct, subprocess, sys, tempfile, unittest

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPT = os.path.join(TOP, "scripts", "convert_olmo.py")
TRAIN = os.path.join(TOP, os.environ.get("BUILD", "build/cpu"), "train")
T, SEQUENCES = 12, 2

# OLMo-1 with clipping and tied weights, and OLMo-2 with grouped queries; vocabularies are padded.
OLMO1 = dict(d_model=32, n_heads=2, n_layers=2, mlp_hidden_size=96, max_sequence_length=T, vocab_size=60, embedding_size=64,
             weight_tying=True, clip_qkv=0.5, rope=True, rope_theta=10000, layer_norm_type="default", layer_norm_with_affine=False,
             attention_layer_norm=False, norm_after=False, include_bias=False, bias_for_layer_norm=False, alibi=False,
             activation_type="swiglu", block_type="sequential", eos_token_id=3, pad_token_id=1, embedding_layer_norm=False,
             scale_logits=False, multi_query_attention=None, layer_norm_eps=1e-05)
OLMO2 = dict(OLMO1, n_heads=2, n_kv_heads=1, weight_tying=False, clip_qkv=None, rope_theta=500000, layer_norm_type="rms",
             layer_norm_with_affine=True, attention_layer_norm=True, attention_layer_norm_with_affine=True, norm_after=True,
             layer_norm_eps=1e-06)


# ---- OLMo's model -----------------------------------------------------------------------------------------------------------

def times(rows, matrix):
    """Returns x W^T; a matrix is a list of rows, one row per output."""
    return [[sum(a * b for a, b in zip(x, w)) for w in matrix] for x in rows]


def norm(x, m, weight=None):
    mean = 0 if m["layer_norm_type"] == "rms" else sum(x) / len(x)
    scale = 1 / math.sqrt(sum((a - mean) ** 2 for a in x) / len(x) + m["layer_norm_eps"])
    return [(a - mean) * scale * (weight[i] if weight else 1) for i, a in enumerate(x)]


def norms(rows, m, w, name):
    return [norm(x, m, w[name + ".weight"][0] if m["layer_norm_with_affine"] else None) for x in rows]


def rotate(x, position, theta):
    """Rotates a head: each pair (i, i + D/2) by the angle position theta^(-2i/D)."""
    half = len(x) // 2
    turned = list(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        turned[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        turned[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return turned


def attention(h, m, w, block):
    H = m["n_heads"]
    K, D = m.get("n_kv_heads") or H, m["d_model"] // H
    qkv = times(h, w[block + "att_proj.weight"])
    if m["clip_qkv"]:
        qkv = [[max(-m["clip_qkv"], min(m["clip_qkv"], a)) for a in x] for x in qkv]
    q, k, v = ([x[a:b] for x in qkv] for a, b in ((0, H * D), (H * D, (H + K) * D), ((H + K) * D, (H + 2 * K) * D)))
    if m["attention_layer_norm"]:
        q, k = norms(q, m, w, block + "q_norm"), norms(k, m, w, block + "k_norm")
    out = [[] for _ in h]
    for head in range(H):
        at, of = head * D, head * K // H * D
        queries = [rotate(x[at:at + D], t, m["rope_theta"]) for t, x in enumerate(q)]
        keys = [rotate(x[of:of + D], t, m["rope_theta"]) for t, x in enumerate(k)]
        for t, x in enumerate(queries):
            p = [math.exp(sum(a * b for a, b in zip(x, keys[u])) / math.sqrt(D)) for u in range(t + 1)]
            out[t] += [sum(p[u] * v[u][of + i] for u in range(t + 1)) / sum(p) for i in range(D)]
    return times(out, w[block + "attn_out.weight"])


def feed_forward(h, w, block):
    both = times(h, w[block + "ff_proj.weight"])
    F = len(both[0]) // 2
    act = [[x[i] * x[F + i] / (1 + math.exp(-x[F + i])) for i in range(F)] for x in both]     # x, gate = chunk; silu(gate) x
    return times(act, w[block + "ff_out.weight"])


def add(a, b):
    return [[x + y for x, y in zip(*rows)] for rows in zip(a, b)]


def loss(tokens, m, w):
    """Returns the mean cross entropy of the next tokens."""
    x = [w["transformer.wte.weight"][t] for t in tokens]
    for i in range(m["n_layers"]):
        block = f"transformer.blocks.{i}."
        if m["norm_after"]:
            x = add(x, norms(attention(x, m, w, block), m, w, block + "attn_norm"))
            x = add(x, norms(feed_forward(x, w, block), m, w, block + "ff_norm"))
        else:
            x = add(x, attention(norms(x, m, w, block + "attn_norm"), m, w, block))
            x = add(x, feed_forward(norms(x, m, w, block + "ff_norm"), w, block))
    x = norms(x, m, w, "transformer.ln_f")
    logits = times(x, w["transformer.wte.weight" if m["weight_tying"] else "transformer.ff_out.weight"])
    return sum(math.log(sum(map(math.exp, z))) - z[t] for z, t in zip(logits, tokens[1:])) / (len(tokens) - 1)


# ---- its files --------------------------------------------------------------------------------------------------------------

def shapes(m):
    C, F, V = m["d_model"], m["mlp_hidden_size"] // 2, m["embedding_size"]
    K = C // m["n_heads"] * (m.get("n_kv_heads") or m["n_heads"])
    yield "transformer.wte", (V, C)
    for i in range(m["n_layers"]):
        block = f"transformer.blocks.{i}."
        yield from ((block + "att_proj", (C + 2 * K, C)), (block + "attn_out", (C, C)), (block + "ff_proj", (2 * F, C)),
                    (block + "ff_out", (C, F)))
        if m["layer_norm_with_affine"]:
            yield from ((block + "q_norm", (1, C)), (block + "k_norm", (1, K)), (block + "attn_norm", (1, C)),
                        (block + "ff_norm", (1, C)))
    if m["layer_norm_with_affine"]:
        yield "transformer.ln_f", (1, C)
    if not m["weight_tying"]:
        yield "transformer.ff_out", (V, C)


def make_weights(m):
    """Makes numbers that are exact in F32, and so large that each of them affects the loss."""
    draw = random.Random(7)
    return {name + ".weight": [list(array.array("f", (draw.gauss(1 if rows == 1 else 0, 0.3) for _ in range(cols))))
                               for _ in range(rows)] for name, (rows, cols) in shapes(m)}


def write_safetensors(path, tensors, name_of=lambda name: name):
    header, data = {}, b""
    for name, rows in tensors.items():
        raw = array.array("f", (a for row in rows for a in row)).tobytes()
        shape = [len(rows[0])] if len(rows) == 1 else [len(rows), len(rows[0])]
        header[name_of(name)] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def yaml(value):
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


class ConvertTest(unittest.TestCase):
    def setUp(self):
        self.top = tempfile.mkdtemp(prefix="coat-olmo-")
        self.addCleanup(shutil.rmtree, self.top, ignore_errors=True)
        self.native, self.output = self.at("native"), self.at("hf")

    def at(self, name):
        return os.path.join(self.top, name)

    def make(self, m, weights, **more):
        os.makedirs(self.native, exist_ok=True)
        with open(os.path.join(self.native, "config.yaml"), "w", encoding="utf-8") as file:
            file.write("run_name: x\nmodel:\n" + "".join(f"  {key}: {yaml(m[key])}\n" for key in m))
            file.write("optimizer:\n  name: adamw\n  betas:\n  - 0.9\n")
        write_safetensors(os.path.join(self.native, "model.safetensors"), weights, **more)

    def convert(self, *more):
        return subprocess.run([sys.executable, SCRIPT, self.native, self.output, *more], capture_output=True, text=True)

    def check_loss(self, m, weights):
        draw = random.Random(3)
        tokens = [draw.randrange(4, m["vocab_size"]) for _ in range(SEQUENCES * T)]
        with open(self.at("data.npy"), "wb") as file:
            file.write(array.array("H", tokens).tobytes())
        command = [*shlex.split(os.environ.get("LAUNCH", "mpirun --oversubscribe")), "-n", "1", TRAIN, f"--load_path={self.output}",
                   f"--data.paths={self.at('data.npy')}", "--recipe=f32", f"--global_train_batch_size={SEQUENCES}",
                   "--max_duration=1", f"--save_folder={self.at('run')}", "--save_num_checkpoints_to_keep=0"]
        run = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        with open(os.path.join(self.at("run"), "metrics.jsonl"), encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        found = next(line["train/CrossEntropyLoss"] for line in lines if "train/CrossEntropyLoss" in line)
        expected = sum(loss(tokens[i:i + T], m, weights) for i in range(0, len(tokens), T)) / SEQUENCES
        # Some 20 operations in a row of up to 64 terms each: as many independent roundings to F32, sqrt(20 * 64) 2^-24 = 2e-6; five
        # times that. Another rope_theta, the least that could be wrong, makes 1e-3.
        self.assertAlmostEqual(found, expected, delta=1e-5 * expected)

    def check_model(self, m, **more):
        weights = make_weights(m)
        self.make(m, weights, **more)
        converted = self.convert()
        self.assertEqual(converted.returncode, 0, converted.stderr)
        if os.path.exists(TRAIN):
            self.check_loss(m, weights)

    def test_olmo(self):
        self.check_model(OLMO1)

    def test_olmo2(self):
        """Pickled names, as OLMo's own safetensors have them."""
        self.check_model(OLMO2, name_of=lambda name: base64.urlsafe_b64encode(pickle.dumps(((name,), False))).decode())
        with open(os.path.join(self.output, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        self.assertEqual(config["architectures"], ["Olmo2ForCausalLM"])
        self.assertEqual([config[key] for key in ("intermediate_size", "num_key_value_heads", "vocab_size", "eos_token_id")],
                         [48, 1, 64, 3])

    def test_refusals(self):
        weights = make_weights(OLMO1)
        without = {name: w for name, w in weights.items() if name != "transformer.blocks.1.ff_out.weight"}
        cases = [
            (OLMO1, without, "there is no tensor transformer.blocks.1.ff_out.weight"),
            (OLMO1, weights | {"transformer.wpe.weight": [[1.0]]}, "transformer.wpe.weight has no place"),
            (OLMO1 | {"mlp_hidden_size": 40}, weights, "expected F32 or BF16 or F16 (40, 32)"),
            (OLMO1 | {"include_bias": True}, weights, "model.include_bias is True"),
            (OLMO1 | {"layer_norm_with_affine": True}, weights, "model.layer_norm_with_affine is True"),
            (OLMO1 | {"alibi": True}, weights, "model.alibi is True"),
            (OLMO1, {}, "there is no embedding"),
        ]
        for m, tensors, words in cases:
            self.make(m, tensors)
            refused = self.convert()
            self.assertNotEqual(refused.returncode, 0)
            self.assertIn(words, refused.stderr)
            self.assertFalse(os.path.exists(os.path.join(self.output, "config.json")))
        evil = pickle.dumps(os.getcwd)
        self.make(OLMO1, weights, name_of=lambda name: base64.urlsafe_b64encode(evil).decode() if "wte" in name else name)
        self.assertIn("has no name of OLMo's", self.convert().stderr)
        self.make(OLMO1, weights)
        os.symlink("nothing", self.output)
        self.assertIn(f"error: {self.output}: cannot be written", self.convert().stderr)

    def test_tokenizer(self):
        self.make(OLMO1, make_weights(OLMO1))
        with open(self.at("mine.json"), "w", encoding="utf-8") as file:
            file.write("{}")
        self.assertEqual(self.convert("--tokenizer", self.at("mine.json")).returncode, 0)
        self.assertTrue(os.path.exists(os.path.join(self.output, "tokenizer.json")))
        self.assertIn("it exists already", self.convert().stderr)


if __name__ == "__main__":
    unittest.main()
