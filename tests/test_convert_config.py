#!/usr/bin/env python3
"""scripts/convert_config.py: published configurations of other programs (tests/configs), and variants of them. For the converted
files of COAT and OLMo, ./train must make the plan that it made when it read these files itself."""
import json, os, re, shutil, subprocess, sys, tempfile, unittest

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPT = os.path.join(TOP, "scripts", "convert_config.py")
TRAIN = os.path.join(TOP, os.environ.get("BUILD", "build/cpu"), "train")
CONFIGS = os.path.join(TOP, "tests", "configs")
MACHINE = ("--dry_run", "--ranks=8", "--internode_gb_per_s=50", "--device_memory=80")
sys.path.insert(0, os.path.join(TOP, "scripts"))

try:
    import yaml
except ImportError:
    yaml = None

# Settings that the recipe replaces, and in which these two files may differ.
REPLACED = re.compile(r"(precision|quantize_\w+\.\w+|recipe|try_load_latest_save)=.*")


def keys_of(tree, prefix=""):
    out = {}
    for key, value in tree.items():
        out.update(keys_of(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return out


@unittest.skipUnless(yaml, "needs the package pyyaml")
@unittest.skipUnless(os.path.exists(TRAIN), f"needs {TRAIN}")
class ConvertConfig(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)

    def run_script(self, path, *more):
        return subprocess.run([sys.executable, SCRIPT, path, *more], capture_output=True, text=True)

    def convert(self, path, *more):
        """Returns the converted keys, and the notes on stderr, which are also at the top of the file."""
        done = self.run_script(path, *more)
        self.assertEqual(done.returncode, 0, done.stderr)
        comments = [line[2:] for line in done.stdout.split("\n\n")[0].split("\n")]
        self.assertEqual(comments, done.stderr.rstrip("\n").split("\n"))
        self.mine = os.path.join(self.folder, "mine.yaml")
        with open(self.mine, "w", encoding="utf-8") as file:
            file.write(done.stdout)
        return keys_of(yaml.safe_load(done.stdout)), done.stderr

    def changed(self, name, change, *more):
        """Converts a file of tests/configs whose text was changed."""
        with open(os.path.join(CONFIGS, name), encoding="utf-8") as file:
            text = file.read()
        self.assertNotEqual(change(text), text)
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(change(text))
        return path if more == ("path",) else self.convert(path, *more)

    def plan(self, *more):
        done = subprocess.run([TRAIN, self.mine, *MACHINE, *more], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("accepted", done.stderr)
        return done.stdout

    def split(self, printed):
        """Returns the settings of a dry run, and the lines from there to the memory plan."""
        settings, colon, rest = printed.partition("\nmodel: ")
        return ({word for word in re.split(r"  |\n", settings.partition("\n")[2]) if word and not REPLACED.match(word)},
                rest.partition("memory plan")[0])

    def same_plan(self, name, *more):
        with open(os.path.join(CONFIGS, name), encoding="utf-8") as file:
            # the earlier name of the key
            settings, model = self.split(file.read().replace("  network=", "  internode_gb_per_s="))
        now, now_model = self.split(self.plan(*more))
        self.assertEqual(now, settings)
        self.assertEqual(now_model, model)

    # ---- OLMo and COAT

    def test_coat(self):
        keys, said = self.convert(os.path.join(CONFIGS, "coat.yaml"))
        self.same_plan("coat.plan")
        self.assertEqual(keys["recipe"], "coat")
        self.assertIs(keys["try_load_latest_save"], True)
        self.assertEqual(keys["save_folder"], "result/checkpoints/OLMo-1B-COAT-Both")
        self.assertEqual(keys["max_duration"], 739328)
        for part in ("use_quantize_model: coat_real, use_quantize_optimizer: coat_fp8_adamw -> recipe: coat", "wandb.*",
                     "evaluators[].data.num_workers", "`expand`"):
            self.assertIn(part, said)

    def test_olmo(self):
        keys, said = self.convert(os.path.join(CONFIGS, "olmo.yaml"))
        self.same_plan("olmo.plan", "--save_folder=runs/x")
        self.assertNotIn("save_folder", keys)
        missing = said.partition("Not known")[2]
        for part in ("save_folder: ${path.choose:${oc.env:SCRATCH_DIR", "data.paths: 249 files are remote", "evaluators: 24 files"):
            self.assertIn(part, missing)
        self.assertEqual(keys["eval_interval"], 1000)
        self.assertEqual(len(keys["data.paths"]), 249)

    def test_recipes_of_coat(self):
        """Returns what COAT's sections mean: a recipe, and the formats in which COAT differs from the recipe."""
        without_model = lambda t: re.sub(r"quantize_model:\n(  .*\n)*", "", t)
        without_states = lambda t: re.sub(r"quantize_optimizer:\n(  .*\n)*", "", t)
        table = (
            (without_states, {"recipe": "coat-act"}), (without_model, {"recipe": "coat-opt"}),
            (lambda t: without_model(without_states(t)), {"recipe": "bf16"}),
            (lambda t: without_model(without_states(t)).replace("amp_bf16", "fp32"), {"recipe": "f32"}),
            (lambda t: without_states(t).replace("coat_real", "fp8linear"), {"recipe": "fp8"}),
            (lambda t: t.replace("coat_real", "fp8linear"),
             {"recipe": "fp8", "format.moment1": "e4m3/128+", "format.moment2": "e4m3/128+"}),
            (lambda t: t.replace("qgroup_size: 128", "qgroup_size: 256").replace("  group_size: 16", "  group_size: 32"),
             {"recipe": "coat", "format.saved_norm_input": "e4m3/32", "format.saved_mlp": "e4m3/32", "format.moment1": "e4m3/256+",
              "format.moment2": "e4m3/256+"}),
            (lambda t: t.replace("second_order_bit: E4M3", "second_order_bit: E5M2").replace(
                "second_order_expansion: expand", "second_order_expansion: none"),
             {"recipe": "coat", "format.moment2": "e5m2/128"}),
            (lambda t: re.sub(r"(f[awo]bit): E4M3", r"\1: E5M2", t),
             {"recipe": "coat", "format.saved_norm_input": "e5m2/16", "format.saved_mlp": "e5m2/16", "format.operand": "e5m2"}),
            (lambda t: t + "\nrecipe: coat-lean\nactivation_checkpointing: whole_layer\ndistributed_strategy: ddp\n",
             {"recipe": "coat-lean", "activations.keep": "block", "fsdp.sharding_strategy": "NO_SHARD"}),
            (lambda t: t + "\nactivation_checkpointing: one_in_four\n", {"recipe": "coat", "activations.recompute": "one_in_four"}),
        )
        for change, expected in table:
            keys = self.changed("coat.yaml", change)[0]
            read = ("recipe", "format", "activations", "fsdp.sharding")
            found = {key: value for key, value in keys.items() if key.startswith(read)}
            self.assertEqual(found, expected)
            self.plan("--model.n_layers=1", "--global_train_batch_size=64")

    def test_references(self):
        keys, said = self.changed("coat.yaml", lambda t: t.replace("    - datasets/dolma/v1_5/part-000-00000.npy",
                                                                   "    - ${path.glob:a/*.npy,b/**.npy}").replace(
            "load_path: ${path.check_exist:result", "load_path: ${path.check_exist:other"))
        self.assertEqual(keys["data.paths"], ["a/*.npy", "b/**.npy"])
        self.assertNotIn("load_path", keys)
        self.assertIn("load_path: ${path.check_exist:other", said.partition("Not known")[2])

    def test_earlier_names(self):
        keys = self.changed("coat.yaml", lambda t: t + "\nformat: {keep: block, scales: microbatch}\n")[0]
        self.assertEqual((keys["activations.keep"], keys["fp8.scales"]), ("block", "microbatch"))

    def test_refused(self):
        for change, *parts in (
            (lambda t: t.replace("activation_type: swiglu", "activation_type: gelu"), "model.activation_type: gelu", "SwiGLU"),
            (lambda t: t.replace("alibi: false", "alibi: true"), "model.alibi: true", "rotary"),
            (lambda t: t.replace("coat_real", "int3"), "int3", "coat_real"),
            (lambda t: t.replace("seed: 6198", "seed: [1"), "coat.yaml:", "expected"),
        ):
            done = self.run_script(self.changed("coat.yaml", change, "path"))
            self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (1, "", 1), done.stderr)
            for part in ("error: ", *parts):
                self.assertIn(part, done.stderr)
        said = self.changed("coat.yaml", lambda t: t + "\ntime_limit: 3600\nstep_hook: x\n")[1]
        self.assertIn("time_limit: 3600: ", said.partition("Left out")[2].partition("Not known")[0])
        self.assertIn("step_hook: x", said.partition("Not known")[2])

    # ---- other programs

    def test_olmo_core(self):
        keys, said = self.convert(os.path.join(CONFIGS, "olmo-core.json"))
        expected = {"model.d_model": 2048, "model.n_layers": 16, "model.n_heads": 16, "model.mlp_hidden_size": 16384,
                    "model.vocab_size": 100278, "model.embedding_size": 100352, "model.norm_after": True,
                    "model.attention_layer_norm": True, "model.layer_norm_type": "rms", "model.layer_norm_eps": "1e-06",
                    "model.rope_theta": 500000, "model.weight_tying": False, "model.max_sequence_length": 4096,
                    "data.memmap_dtype": "uint32", "global_train_batch_size": 512, "device_train_microbatch_size": 4,
                    "max_duration": "4000000000000T", "optimizer.learning_rate": 0.0004, "optimizer.decay_embeddings": False,
                    "optimizer.decay_norm_and_bias": True, "optimizer.eps": "1e-08", "spikes": "skip",
                    "scheduler.name": "cosine_with_warmup", "scheduler.t_warmup": 2000, "scheduler.alpha_f": 0.1,
                    "auxiliary_loss_multiplier": "1e-05", "recipe": "bf16", "fsdp.sharding_strategy": "HYBRID_SHARD",
                    "fsdp.precision": "mixed", "save_interval_ephemeral": 500}
        self.assertEqual({key: keys.get(key) for key in expected}, expected)
        self.assertIn("OLMoE-mix-0824", said.partition("Not known")[2])
        self.assertNotIn("_CLASS_", said.partition("Not known")[2])
        planned = self.plan("--fsdp.hybrid_sharding_num_model_replicas=2")
        self.assertIn("model: 1485 M parameters, 16 blocks of width 2048", planned)       # OLMo-2 1B

    def test_olmo_core_variants(self):
        def edit(change):
            def text(original):
                tree = json.loads(original)
                change(tree, tree["model"]["block"], tree["train_module"])
                return json.dumps(tree)
            return text

        def windows(tree, block, train):
            block["sequence_mixer"]["sliding_window"] = {"pattern": [64, 64, 64, -1], "force_full_attention_on_first_layer": False,
                                                         "force_full_attention_on_last_layer": True}
            tree["model"]["n_layers"] = 6
        keys = self.changed("olmo-core.json", edit(windows))[0]
        self.assertEqual(keys["model.sliding_window"], 64)
        self.assertEqual([t[0] for t in keys["model.layer_types"]], list("sssfsf"))

        def wsd(tree, block, train):
            train["scheduler"] = {"type": "wsd", "units": "tokens", "warmup": 1000, "decay_fraction": 0.25, "decay_min_lr": 0.0001}
            train["float8_config"] = {"enabled": True}
        keys = self.changed("olmo-core.json", edit(wsd))[0]
        self.assertEqual((keys["scheduler.name"], keys["scheduler.t_decay"], keys["scheduler.alpha_f"], keys["recipe"]),
                         ("wsd", 10**12, 0.25, "fp8"))
        for name, change in (("moe", lambda tree, block, train: block.update(name="moe")),
                             ("embed_scale", lambda tree, block, train: tree["model"].update(embed_scale=2.0)),
                             ("bias", lambda tree, block, train: block["sequence_mixer"].update(bias=True)),
                             ("block_overrides",
                              lambda tree, block, train: tree["model"].update(block_overrides={"0": {"name": "x"}}))):
            done = self.run_script(self.changed("olmo-core.json", edit(change), "path"))
            self.assertEqual(done.returncode, 1)
            self.assertIn(name, done.stderr)

    def test_torchtitan(self):
        path = os.path.join(CONFIGS, "torchtitan.toml")
        keys, said = self.convert(path, "--ranks", "64")
        expected = {"model.d_model": 4096, "model.n_layers": 32, "model.n_heads": 32, "model.n_kv_heads": 8,
                    "model.mlp_hidden_size": 28672, "model.vocab_size": 128256, "model.max_sequence_length": 8192, "recipe": "fp8",
                    "optimizer.learning_rate": 0.0003, "optimizer.weight_decay": 0.1, "scheduler.name": "wsd",
                    "scheduler.t_warmup": 200, "scheduler.t_decay": 200, "scheduler.alpha_f": 0.1, "max_duration": 1000,
                    "global_train_batch_size": 32, "parallelism.tensor": 2, "activations.recompute": "one_in_two",
                    "save_folder": "outputs/llama3/checkpoint", "max_grad_norm": 1.0}
        self.assertEqual({key: keys.get(key) for key in expected}, expected)
        self.assertIn("model: 8030 M parameters", self.plan())                             # Llama 3 8B
        keys, said = self.convert(path)
        self.assertEqual(keys["global_train_batch_size"], 1)
        self.assertIn("global_train_batch_size: the file gives the sequences per GPU", said.partition("Not known")[2])
        keys, said = self.changed("torchtitan.toml", lambda t: t.replace('"8B"', '"9B"').replace("decay_ratio = 0.2\n", ""))
        self.assertEqual(keys["scheduler.name"], "linear_with_warmup")
        self.assertIn("the shape of llama3 9B is in torchtitan's code", said)

    def test_axolotl(self):
        keys, said = self.convert(os.path.join(CONFIGS, "axolotl.yml"), "--ranks", "4")
        expected = {"load_path": "NousResearch/Meta-Llama-3-8B", "recipe": "bf16", "lora.rank": 32, "lora.alpha": 16,
                    "lora.target_modules": "all-linear", "global_train_batch_size": 32, "device_train_microbatch_size": 2,
                    "model.max_sequence_length": 4096, "data.packing": "best_fit", "max_duration": "4ep",
                    "optimizer.name": "adamw8bit", "optimizer.learning_rate": 0.0002, "optimizer.betas": [0.9, 0.999],
                    "scheduler.name": "cosine_with_warmup", "scheduler.warmup_fraction": 0.1, "activations.keep": "block",
                    "save_folder": "./outputs/lora-out"}
        self.assertEqual({key: keys.get(key) for key in expected}, expected)
        for part in ("alpaca_2k_test", "lora_modules_to_save", "val_set_size: 0.05", "hf download"):
            self.assertIn(part, said.partition("Not known")[2])
        self.assertIn("lora_dropout", said.partition("Left out")[2])
        self.plan("--ranks=4", "--load_path=tests/golden/llama", "--model.max_sequence_length=64")
        done = self.run_script(self.changed("axolotl.yml", lambda t: t + "\nrl: dpo\n", "path"))
        self.assertIn("rl: dpo", done.stderr)
        for wrong in ("micro_batch_size: [2]", "micro_batch_size: many", "datasets: 5", "base_model: {a: 1}"):
            name = wrong.partition(":")[0]
            without = re.compile(rf"(?m)^{name}:.*\n(?: .*\n)*")
            done = self.run_script(self.changed("axolotl.yml", lambda t: without.sub("", t) + f"\n{wrong}\n", "path"))
            self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (1, "", 1), done.stderr)

    def test_training_arguments(self):
        keys, said = self.convert(os.path.join(CONFIGS, "training-arguments.yaml"), "--ranks", "8")
        expected = {"load_path": "Qwen/Qwen3-4B-Instruct-2507", "recipe": "bf16", "global_train_batch_size": 16,
                    "device_train_microbatch_size": 1, "model.max_sequence_length": 2048, "max_duration": "3.0ep",
                    "optimizer.name": "adamw", "optimizer.learning_rate": 1e-05, "optimizer.eps": "1e-08",
                    "scheduler.name": "cosine_with_warmup", "scheduler.warmup_fraction": 0.1, "scheduler.alpha_f": 0.0,
                    "scheduler.warmup_min_lr": 0, "fsdp.sharding_strategy": "FULL_SHARD", "save_interval": 500,
                    "eval_interval": None, "seed": 42, "max_grad_norm": 1.0}
        self.assertEqual({key: keys.get(key, "missing") for key in expected}, expected)
        self.plan("--load_path=tests/golden/qwen3", "--model.max_sequence_length=64")
        arguments = {"output_dir": "out", "per_device_train_batch_size": 4, "learning_rate": 2e-5, "max_steps": 300,
                     "warmup_steps": 30, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 2e-6},
                     "bf16": True, "optim": "adafactor", "model_name_or_path": CONFIGS, "max_length": 1024, "packing": True,
                     "use_peft": True, "lora_r": 8,
                     "lora_target_modules": ["q_proj", "v_proj", "lm_head"], "load_in_4bit": True, "eval_strategy": "epoch",
                     "past_index": -1, "adafactor": False}
        path = os.path.join(self.folder, "arguments.json")
        with open(path, "w") as file:
            json.dump(arguments, file)
        keys, said = self.convert(path)
        expected = {"scheduler.alpha_f": 0.1, "max_duration": 300, "scheduler.t_warmup": 30, "lora.rank": 8, "lora.alpha": 32,
                    "lora.target_modules": ["q_proj", "v_proj"], "lora.base": "nf4", "optimizer.name": "adafactor",
                    "eval_interval": None}
        self.assertEqual({key: keys.get(key, "missing") for key in expected}, expected)
        missing = said.partition("Not known")[2]
        for part in ("adafactor", "lm_head", "past_index", "eval_interval: once per epoch"):
            self.assertIn(part, missing)

    # ---- files that cannot be converted

    def test_not_configurations(self):
        for name, data, part in (("training_args.bin", b"\x80\x02}q\x00.", "pickle"), ("list.yaml", b"- 1\n", "keys and values"),
                                 ("other.yaml", b"a: 1\nb: 2\n", "a, b"), ("bad.json", b"{", "bad.json"),
                                 ("bad.toml", b"a =", "bad.toml")):
            path = os.path.join(self.folder, name)
            with open(path, "wb") as file:
                file.write(data)
            done = self.run_script(path)
            self.assertEqual((done.returncode, done.stdout), (1, ""), name)
            self.assertIn(part, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        done = self.run_script(os.path.join(self.folder, "none.yaml"))
        self.assertIn("No such file", done.stderr)


if __name__ == "__main__":
    unittest.main()
