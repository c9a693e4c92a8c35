/* Rows of config_keys.c for models with images, in several places of it. Only config_keys.c includes it. */
#pragma once

#define IMAGE_MODEL_ROWS \
    OPTION("model.image_feature_size", INT, "null", 0, 1, 65536, C(model.image.feature_size), \
           "values of a row of an image's features, which the projector reads; null: a model of " \
           "text only"), \
        OPTION("model.image_tokens", INT, "null", 0, 1, 1 << 20, C(model.image.rows), \
               "rows of features, and so tokens, of an " \
               "image"), \
        OPTION("model.image_token_id", INT, "null", -1, 0, MANY, C(model.image.token_id), \
               "the token at the places of images"), \
        WORD("model.projector", CHOICE, "mlp", \
             WORDS({ "mlp", PROJECTOR_MLP }, { "linear", PROJECTOR_LINEAR }), \
             C(model.image.projector), \
             "from features to the stream. mlp: linear, GELU, linear; linear: one layer"), \
        OTHER("model.projector_bias", BOOL, "true", C(model.image.bias), "its layers have biases")

#define PROJECTOR_ADAPTER_ROWS \
    OTHER("lora.projector", BOOL, "true", C(model.lora.projector), \
          "in a model with images also train the whole projector, " \
          "which is stored next to the adapters, as PEFT's modules_to_save"), \
        ONLY("lora.modules_to_save", "null", \
             "with lora only adapters and, by lora.projector, the projector are trained; " \
             "`trainable` without lora trains tensors")

#define IMAGE_DATA_ROWS \
    OTHER("data.image_paths", PATHS, "[]", C(data.files.image_paths), \
          "indexes of images, parallel to paths (data/README.md)"), \
        OTHER("data.image_features", STRING, "null", C(data.files.image_features), \
              "folder of the features of these images, written by scripts/make_image_features.py")

#define IMAGE_SOURCE_ROWS \
    OTHER("data.mix[].image_paths", PATHS, "[]", S(files.image_paths), \
          "as data.image_paths, for its paths"), \
        OTHER("data.mix[].image_features", STRING, "null", S(files.image_features), \
              "as data.image_features")

#define IMAGE_EVALUATOR_ROWS \
    OTHER("evaluators[].data.image_paths", PATHS, "[]", E(files.image_paths), \
          "as data.image_paths, parallel to paths"), \
        OTHER("evaluators[].data.image_features", STRING, "null", E(files.image_features), \
              "as data.image_features; downstream: of the pictures that questions show, without " \
              "image_paths")

#define GENERATE_FEATURES_ROW \
    OTHER("generate_features", STRING, "null", C(generate_features), \
          "generate: folder of the features of the images that prompts show, as {\"tokens\": " \
          "[...], \"images\": [0]}")

#define PROJECTOR_RATE_ROW \
    OPTION( \
        "optimizer.projector_learning_rate", DOUBLE, "null", 0, TINY, 1e3, \
        C(optimizer.projector_lr), \
        "highest learning rate of the projector, with the same schedule; default learning_rate")

static_assert(offsetof(TokenFiles, num_image_paths) ==
                  offsetof(TokenFiles, image_paths) + sizeof(char **),
              "PATHS");
