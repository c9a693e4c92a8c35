#include <dlfcn.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <vector>
extern "C" {
#define _Noreturn
#include "kernels/kernels.h"
#include "kernels/tensor.h"
#include "kernels/values.h"
}
int main(int c, char **v)
{
    void *h = dlopen(v[1], RTLD_NOW); if (!h) { puts(dlerror()); return 1; }
    auto q = (decltype(&quantize))dlsym(h, "quantize"); auto r = (decltype(&operand_ranges))dlsym(h, "operand_ranges");
    auto sb = (decltype(&swiglu_backward))dlsym(h, "swiglu_backward");
    auto st = (decltype(&tensor_store))dlsym(h, "tensor_store");
    *(int *)dlsym(h, "emu_seed") = 1;
    auto mk = [&](Format f, int rows, int cols) { Tensor t = {}; t.format = f; t.rows = rows; t.cols = cols; t.data = aligned_alloc(256, (size_t)rows * cols * 4 + 256); memset(t.data, 0, rows * cols * 4); t.scale = aligned_alloc(256, 4096); memset(t.scale, 0, 4096); *(float *)t.scale = 0.01f; return t; };
    const Format H = { BF16 }, E4 = { E4M3 }, E5 = { E5M2 };
    Tensor in[2] = { mk(H, 16, 64), mk(H, 16, 64) }, y = mk(E4, 16, 64), dact = mk(H, 16, 48), wide = mk(H, 16, 96), other = mk(E5, 16, 96);
    in[0].scale = in[1].scale = dact.scale = wide.scale = NULL;
    for (int k = 0; k < 2; k++) { std::vector<float> x(16 * 64); for (size_t i = 0; i < x.size(); i++) x[i] = (k ? 0.125f : 8.f) * sinf(i * 0.37f); st(in[k], 0, x.data(), x.size()); }
    { std::vector<float> x(16 * 96); for (size_t i = 0; i < x.size(); i++) x[i] = cosf(i * 0.7f); st(wide, 0, x.data(), x.size()); for (auto &e : x) e /= 1024; st(dact, 0, x.data(), 16 * 48); }
    y.range = (float *)aligned_alloc(256, 256);
    int bad = 0, first = -1;
    Tensor none = {}; LowProduct np = {};
    q(y, in[0]); sb(other, none, dact, np, wide);
    for (int start = 0; start < 3; start++) {
    const float expected = *(float *)other.scale;
    for (int turn = 0; turn < 2; turn++) {
        r(RANGES_KEPT); for (int i = 0; i < 512; i++) q(y, in[0]); r(RANGES_MEASURED);
        for (int i = 0; i < 1025; i++) { sb(other, none, dact, np, wide);
            if (*(float *)other.scale != expected) { bad++; printf("start %d turn %d operation %d: scale %g expected %g\n", start, turn, i, *(float *)other.scale, expected); } } }
    for (int i = 0; i < 7 * start; i++) sb(other, none, dact, np, wide);
    }
    printf("%d wrong\n", bad);
}
