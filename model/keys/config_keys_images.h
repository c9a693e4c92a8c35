/* The rows of config_keys.c for models with images; config_keys.c uses them in several places. Only
 * config_keys.c includes this file. */
#pragma once

#define IMAGE_MODEL_ROWS \
    OPTION("model.image_feature_size", INT, "null", 0, 1, 65536, C(model.image.feature_size), \
           "width of image features, the input of the projector; null: a model " \
           "without images"), \
        OPTION("model.image_tokens", INT, "null", 0, 1, 1 << 20, C(model.image.rows), \
               "rows of features per image; each row takes the place of one token"), \
        OPTION("model.image_token_id", INT, "null", -1, 0, MANY, C(model.image.token_id), \
               "token id at the positions of image rows"), \
        WORD("model.projector", CHOICE, "mlp", \
             WORDS({ "mlp", PROJECTOR_MLP }, { "linear", PROJECTOR_LINEAR }), \
             C(model.image.projector), \
             "layers from image features to the residual stream. mlp: linear, GELU, " \
             "linear; linear: one layer"), \
        OTHER("model.projector_bias", BOOL, "true", C(model.image.bias), \
              "the projector's layers have biases")

#define PROJECTOR_ADAPTER_ROWS \
    OTHER("lora.projector", BOOL, "true", C(model.lora.projector), \
          "in a model with images, also train all weights of the projector, and " \
          "store the projector with the adapters, as PEFT's modules_to_save"), \
        ONLY("lora.modules_to_save", "null", \
             "LoRA trains only adapters and, with lora.projector, the projector; to " \
             "train other tensors, use `trainable` without lora")

#define IMAGE_DATA_ROWS \
    OTHER("data.image_paths", PATHS, "[]", C(data.files.image_paths), \
          "image indexes, one file per shard (data/README.md)"), \
        OTHER("data.image_features", STRING, "null", C(data.files.image_features), \
              "folder of image features, written by scripts/make_image_features.py")

#define IMAGE_SOURCE_ROWS \
    OTHER("data.mix[].image_paths", PATHS, "[]", S(files.image_paths), \
          "image indexes, one file per shard of the source"), \
        OTHER("data.mix[].image_features", STRING, "null", S(files.image_features), \
              "as data.image_features")

#define IMAGE_EVALUATOR_ROWS \
    OTHER("evaluators[].data.image_paths", PATHS, "[]", E(files.image_paths), \
          "image indexes, one file per shard of the evaluation set"), \
        OTHER("evaluators[].data.image_features", STRING, "null", E(files.image_features), \
              "folder of image features of the evaluation set. With type downstream: " \
              "features of the images in the questions; do not give image_paths")

#define GENERATE_FEATURES_ROW \
    OTHER("generate_features", STRING, "null", C(generate_features), \
          "generate: folder of image features. A prompt names its images by number: " \
          "{\"tokens\": [...], \"images\": [0]}")

#define PROJECTOR_RATE_ROW \
    OPTION("optimizer.projector_learning_rate", DOUBLE, "null", 0, TINY, 1e3, \
           C(optimizer.projector_lr), \
           "peak learning rate of the projector, with the same LR schedule; default: " \
           "learning_rate")

static_assert(offsetof(TokenFiles, num_image_paths) ==
                  offsetof(TokenFiles, image_paths) + sizeof(char **),
              "PATHS");
