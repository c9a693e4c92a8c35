"""The settings in a model's folder on which features of pictures depend. (Features also depend on the pictures and on the
weights of the vision tower.) features.json stores each setting as [the value that made the features, the default of a folder
without it]. data/image_settings.c compares the same settings."""
import json, os

from errors import Bad

FILES = {"config": "config.json", "vision_config": "vision_config of config.json", "image_processor": "preprocessor_config.json"}
TOWERS = ("clip_vision_model", "siglip_vision_model")
TOWER = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels", "image_size",
         "patch_size", "hidden_act", "layer_norm_eps")
PROCESSOR = ("do_convert_rgb", "do_resize", "size", "default_to_square", "resample", "do_center_crop", "crop_size", "do_rescale",
             "rescale_factor", "do_normalize", "image_mean", "image_std", "do_pad", "pad_size", "feature_extractor_type")
NO_VALUES = ("image_processor_type", "processor_class", "transformers_version", "_valid_processor_keys", "data_format",
             # keys that do not change values of a picture
             "input_data_format", "return_tensors", "device", "disable_grouping")


def read_json(path):
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as problem:
        raise Bad(f"{path}: {problem}; expected JSON")
    if not isinstance(found, dict):
        raise Bad(f"{path}: expected an object of JSON")
    return found


def read(folder):
    """{key of FILES: the object; None: there is none}. transformers 5 stores the processor in processor_config.json."""
    config, found = read_json(os.path.join(folder, "config.json")), read_json(os.path.join(folder, "processor_config.json")) or {}
    if config is None:
        raise Bad(f"{folder} has no config.json; expected a LLaVA folder")
    return {"config": config, "vision_config": config.get("vision_config"),
            "image_processor": found.get("image_processor") or read_json(os.path.join(folder, "preprocessor_config.json"))}


def layer_of(config):
    return -2 if config.get("vision_feature_layer") is None else config["vision_feature_layer"]


def strategy_of(config):
    return config.get("vision_feature_select_strategy") or "default"


def check(folder):
    """read(folder), or an error if ./train does not support the tower (model/formats/llava.c)."""
    found = read(folder)
    config, path = found["config"], os.path.join(folder, "config.json")
    if config.get("model_type") != "llava":
        raise Bad(f"{folder}: its model_type is {config.get('model_type')}; expected llava, a model with images")
    layer, strategy = layer_of(config), strategy_of(config)
    kind = (found["vision_config"] or {}).get("model_type", TOWERS[0])
    if kind not in TOWERS:
        raise Bad(f"{path}: vision_config is of model_type {kind}; only {' and '.join(TOWERS)} are supported")
    if isinstance(layer, list):
        raise Bad(f"{path}: vision_feature_layer is a list; features of several layers are not supported")
    if type(layer) is not int:
        raise Bad(f"{path}: vision_feature_layer is {json.dumps(layer)}; expected a number, such as -2")
    if strategy not in ("default", "full"):
        raise Bad(f"{path}: vision_feature_select_strategy is {strategy}; expected default or full")
    return found


def of_model(found, tower, processor):
    """The settings. found: read(folder); tower, processor: the config of the vision tower and the image processor of the
    model, as transformers makes them."""
    raw, used, usual = found["image_processor"] or {}, processor.to_dict(), type(processor)().to_dict()
    keys = dict.fromkeys([*PROCESSOR, *used, *raw])
    settings = {
        "config": {"vision_feature_layer": [layer_of(found["config"]), -2],
                   "vision_feature_select_strategy": [strategy_of(found["config"]), "default"]},
        "vision_config": {key: [getattr(tower, key), getattr(type(tower)(), key)] for key in TOWER},
        "image_processor": {key: [used.get(key, raw.get(key)), usual.get(key)] for key in keys if key not in NO_VALUES},
        # which of the processors with this name: they round differently
        "program": {"image_processor": [getattr(processor, "backend", type(processor).__name__), None]},
    }
    settings["vision_config"]["model_type"][1] = TOWERS[0]
    settings["image_processor"]["image_processor_type"] = [raw.get("image_processor_type"), None]
    return json.loads(json.dumps(settings))


def same(given, used):
    """Whether two settings are equal. A number equals an object whose values are all this number: 336 equals {"shortest_edge":
    336}."""
    number = isinstance(given, (int, float)) and isinstance(used, dict)
    return given == used or (number and all(one == given for one in used.values()))


def differing(settings, folder):
    """(the first different setting in the folder, its value for the features); None: all are equal. A folder without a tower can
    train on the features of any tower, and a folder without an image processor may have the processor of the features."""
    found = read(folder)
    for part, name in FILES.items():
        if not found["vision_config"] or found[part] is None:
            continue
        for key, (used, usual) in settings.get(part, {}).items():
            given = found[part].get(key)
            if not same(usual if given is None else given, used) and not (key in found[part] and given == used):
                return f"{key} ({name}) is {json.dumps(given)}, but the features were made with {json.dumps(used)}"
    return None
