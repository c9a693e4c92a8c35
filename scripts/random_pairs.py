#!/usr/bin/env python3
"""Writes preference pairs of random tokens, to measure the speed of training on pairs.

    python3 scripts/random_pairs.py --vocabulary 128256 --pairs 4096 FOLDER
    ./train configs/Llama-3-8B.yaml --data.paths='[FOLDER/ids.npy]' --data.label_mask_paths='[FOLDER/mask.npy]' \\
        --data.packing=best_fit --data.document_boundaries=metadata --data.memmap_dtype=uint32 --preference.loss=dpo ...

Lengths are log-normal with sigma 0.7. Prompts have a median of 130 tokens, answers of 280; both are cut at 2,048. This is an
assumption about real data, such as UltraFeedback. The labels are the answers.
"""
import argparse, gzip, os

import numpy as np

SIGMA, PROMPT, ANSWER, LONGEST = 0.7, 130, 280, 2048


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--vocabulary", type=int, required=True, help="number of token ids")
    parser.add_argument("--pairs", type=int, default=4096)
    args = parser.parse_args()
    random = np.random.default_rng(1)
    lengths = lambda median: np.clip(np.exp(random.normal(np.log(median), SIGMA, args.pairs)).astype(int), 1, LONGEST)
    ids, mask, rows, at = [], [], [], 0
    for prompt, *sides in zip(lengths(PROMPT), lengths(ANSWER), lengths(ANSWER)):
        question = random.integers(3, args.vocabulary, prompt)
        for side in sides:
            ids += [question, random.integers(3, args.vocabulary, side)]
            mask += [np.zeros(prompt, bool), np.ones(side, bool)]
            rows.append(f"{at},{at + prompt + side}\n")
            at += prompt + side
    os.makedirs(args.folder)
    np.concatenate(ids).astype("<u4").tofile(os.path.join(args.folder, "ids.npy"))
    np.concatenate(mask).tofile(os.path.join(args.folder, "mask.npy"))
    with gzip.open(os.path.join(args.folder, "ids.csv.gz"), "wt") as file:
        file.writelines(rows)
    print(f"{args.pairs} pairs, {at} tokens: {at / args.pairs:.1f} tokens of a pair")


if __name__ == "__main__":
    main()
