#include <dlfcn.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <vector>
#include <random>
#include <functional>
extern "C" {
#define _Noreturn
#include "kernels/kernels.h"
#include "kernels/tensor.h"
#include "kernels/values.h"
#include "kernels/fp8.h"
}
extern "C" void __asan_poison_memory_region(void const volatile *, size_t);
struct Api {
#define FUNCS X(quantize) X(quantize_codes) X(quantize_scale) X(operand_ranges) X(expand_operand) X(norm_forward) X(norm_forward_exact) X(norm_again) X(norm_backward) \
 X(rope_forward) X(rope_forward_exact) X(rope_backward) X(swiglu_forward) X(swiglu_forward_exact) X(swiglu_backward) X(cross_entropy) X(cross_entropy_codes) \
 X(lora_dw) X(lora_widen) X(embedding_backward) X(sort_tokens)
#define X(f) decltype(&::f) f;
FUNCS
#undef X
    void load(const char *so) { void *h = dlopen(so, RTLD_NOW | RTLD_LOCAL); if (!h) { puts(dlerror()); exit(1); }
#define X(f) f = (decltype(f))dlsym(h, #f); if (!f) { printf("no %s\n", #f); exit(1); }
FUNCS
#undef X
    seed = (int *)dlsym(h, "emu_seed"); sms = (int *)dlsym(h, "emu_sms"); errors = (int *)dlsym(h, "emu_errors"); launches = (long *)dlsym(h, "emu_launches"); load_ = (decltype(load_))dlsym(h, "tensor_load"); store_ = (decltype(store_))dlsym(h, "tensor_store"); }
    int *seed, *sms, *errors; long *launches; decltype(&tensor_load) load_; decltype(&tensor_store) store_;
};
static Api cpu, gpu; static int bad, cases; static std::mt19937 rng(7); static const char *group_name = ""; static char what[300];
static std::vector<void *> owned;
static void *mem(size_t n) { size_t r = (n + 255) / 256 * 256 + 256; char *p = (char *)aligned_alloc(256, r); memset(p, 0xff, r); __asan_poison_memory_region(p + n, r - n); owned.push_back(p); return p; }
struct T3 { Tensor t[3]; operator bool() const { return t[0].data; } };
static size_t esize(Format f) { return f.dtype == F32 ? 4 : f.dtype == BF16 ? 2 : 1; }
static bool fp8(Format f) { return f.dtype == E4M3 || f.dtype == E5M2; }
static size_t sbytes(Tensor t) { return !fp8(t.format) ? 0 : t.format.group ? (size_t)t.rows * t.cols / t.format.group : 4; }
static const Format F = { F32 }, H = { BF16 };
static T3 mk(Format f, int rows, int cols, bool tr = false, float range = -1) {
    T3 x = {}; for (int k = 0; k < 3; k++) { Tensor &t = x.t[k]; t.format = f; t.rows = rows; t.cols = cols; t.data = mem((size_t)rows * cols * esize(f));
        if (fp8(f)) t.scale = mem(sbytes(t)); if (fp8(f) && !f.group) *(float *)t.scale = 0.01f; if (tr) t.data_t = mem((size_t)rows * cols); if (range >= 0) { t.range = (float *)mem(4); *t.range = range; } } return x; }
static float value(int kind) { static std::normal_distribution<float> n; float z = n(rng);
    switch (kind) { case 0: return z; case 1: return ldexpf(z, (int)(rng() % 40) - 20); case 2: return rng() % 3 ? 0 : ldexpf(z, (int)(rng() % 200) - 130);
        case 3: return (float)((int)(rng() % 7) - 3); case 4: { uint32_t u = rng(); float v; memcpy(&v, &u, 4); return std::isnan(v) ? 1 : v; } case 5: return rng() % 97 ? z : rng() % 2 ? INFINITY : NAN; } return z; }
static T3 filled(Format f, int rows, int cols, int kind, bool tr = false) { T3 x = mk(f, rows, cols, tr); std::vector<float> v((size_t)rows * cols); for (auto &e : v) e = value(kind);
    if (fp8(f) && !f.group) { float m = 0; for (auto e : v) m = fmaxf(m, fabsf(e)); float s = m > 0 ? m / (f.dtype == E4M3 ? 448 : 57344) : 1; for (int k = 0; k < 3; k++) *(float *)x.t[k].scale = s; }
    for (int k = 0; k < 3; k++) cpu.store_(x.t[k], 0, v.data(), v.size()); return x; }
static void run(const std::function<void(Api &, int)> &f) { cases++; f(cpu, 0); *gpu.seed = 1; f(gpu, 1); *gpu.seed = 2; f(gpu, 2); }
static void fail(const char *n, const char *m, size_t d, size_t of) { if (bad++ < 60) printf("BAD %s %s: %s %s %zu of %zu\n", group_name, what, n, m, d, of); }
static size_t diff(const void *a, const void *b, size_t n, size_t &first) { size_t d = 0; for (size_t i = 0; i < n; i++) if (((char *)a)[i] != ((char *)b)[i]) { if (!d) first = i; d++; } return d; }
/* tol 0: bits; else codes may differ by one step in a fraction tol, floats relatively by tol of the largest */
static void same(const char *n, const T3 &x, double tol = 0) {
    if (!x.t[0].data && !x.t[0].data_t) return;
    const Tensor &a = x.t[0], &b = x.t[1], &c = x.t[2]; size_t num = (size_t)a.rows * a.cols, f;
    size_t bytes = num * esize(a.format), d;
    if (b.data && (d = diff(b.data, c.data, bytes, f))) fail(n, "runs differ", d, bytes);
    if (b.data_t && (d = diff(b.data_t, c.data_t, num, f))) fail(n, "runs differ in columns", d, num);
    if (b.scale && (d = diff(b.scale, c.scale, sbytes(b), f))) fail(n, "runs differ in scales", d, sbytes(b));
    if (tol == 0) {
        if (a.data && (d = diff(a.data, b.data, bytes, f))) { fail(n, "bytes differ", d, bytes); if (bad < 60) printf("   first at %zu: row %zu col %zu\n", f, f / esize(a.format) / a.cols, f / esize(a.format) % a.cols); }
        if (a.data_t && (d = diff(a.data_t, b.data_t, num, f))) { fail(n, "columns differ", d, num); if (bad < 60) printf("   first at %zu\n", f); }
        if (a.scale && (d = diff(a.scale, b.scale, sbytes(a), f))) { fail(n, "scales differ", d, sbytes(a)); if (bad < 60) printf("   first at %zu\n", f); }
        if (a.range && memcmp(a.range, b.range, 4)) fail(n, "range differs", 1, 1);
        return;
    }
    if (!a.data) { size_t k = 0, big = 0; for (size_t i = 0; i < num; i++) { int p = ((uint8_t *)a.data_t)[i], q = ((uint8_t *)b.data_t)[i]; k += p != q; big += abs(p - q) > 1; } if (k > tol * num + 2 || big) fail(n, "columns far", k, num); return; }
    std::vector<float> u(num), v(num); cpu.load_(u.data(), a, 0, num); cpu.load_(v.data(), b, 0, num);
    double m = 0, e = 0; size_t far = 0; const double step = a.format.dtype == E4M3 ? 0.126 : a.format.dtype == E5M2 ? 0.26 : a.format.dtype == BF16 ? 0.0079 : 1e-5;
    for (size_t i = 0; i < num; i++) m = fmax(m, fabs(u[i]));
    for (size_t i = 0; i < num; i++) { if (std::isnan(u[i]) != std::isnan(v[i])) far += 1000000; double q = fabs(u[i] - v[i]); e += q > 1e-5 * m; if (q > step * fabs(u[i]) + 1e-4 * m) far++; }
    if (far || (fp8(a.format) && e > tol * num + 2)) fail(n, "values far", far ? far : (size_t)e, num);
    if (a.data_t) for (int r = 0; r < a.rows; r++) for (int cc = 0; cc < a.cols; cc++) if (((uint8_t *)b.data_t)[(size_t)cc * a.rows + r] != ((uint8_t *)b.data)[(size_t)r * a.cols + cc]) { fail(n, "columns are not rows'", r, cc); return; }
    if (a.range && fabs(*a.range - *b.range) > 1e-5 * fabs(*a.range)) fail(n, "range far", 0, 0);
}
static void fin() { for (void *p : owned) free(p); owned.clear(); }
#define SAY(...) snprintf(what, sizeof what, __VA_ARGS__)
static const Format fmts[] = { { F32 }, { BF16 }, { E4M3, 0 }, { E5M2, 0 }, { E4M3, 16 }, { E5M2, 16 } };
static double chance = 1; static bool skip() { static std::mt19937 r(getenv("S") ? atoi(getenv("S")) : 3); return (r() >> 8) / 16777216.0 >= chance; }
static void t_quantize() {
    group_name = "quantize"; const int rows[] = { 1, 16, 66 }, cols[] = { 16, 48, 1040, 5120 };
    for (int N : rows) for (int C : cols) for (auto fx : fmts) for (auto fy : fmts) for (int kind : { 0, 2, 4, 5 }) { if (C == 5120 && (N == 66 || kind != 2)) continue;
        if (fx.dtype > BF16 && kind > 2) continue; if (N > 16 && kind == 0) continue;
        SAY("N %d C %d %d/%d -> %d/%d kind %d", N, C, fx.dtype, fx.group, fy.dtype, fy.group, kind);
        T3 x = filled(fx, N, C, kind), y = mk(fy, N, C, fp8(fy) && !fy.group && N % 16 == 0);
        if (fp8(fy) && !fy.group && (fx.dtype == fy.dtype && fx.group == fy.group)) continue;
        run([&](Api &a, int k) { a.quantize(y.t[k], x.t[k]); });
        if (kind == 5 && fp8(fy) && !fy.group) { fin(); continue; }
        same("y", y); fin(); }
    for (int g : { 8, 24, 32, 256 }) for (auto fx : fmts) { SAY("group %d from %d/%d", g, fx.dtype, fx.group); T3 x = filled(fx, 5, 768, 2), y = mk({ E4M3, g }, 5, 768), z = mk(H, 5, 768); run([&](Api &a, int k) { a.quantize(y.t[k], x.t[k]); a.quantize(z.t[k], y.t[k]); }); same("y", y); same("z", z); fin(); }
    group_name = "padded";
    for (int N : { 1, 15, 16, 21, 37, 93, 130 }) for (int C : { 16, 37, 48, 91, 208 }) for (auto fx : { F, H, Format{ E4M3, 16 } }) for (int form = 0; form < 3; form++) for (DType d : { E4M3, E5M2 }) {
        if (fp8(fx) && C % 16) continue; const int R = (N + 15) / 16 * 16 + (form == 2 ? 16 : 0);
        SAY("N %d of %d C %d form %d from %d", N, R, C, form, fx.dtype); T3 x = filled(fx, N, C, 0), y = mk({ d, 0 }, R, C, form > 0);
        if (form == 2) for (auto &t : y.t) t.data = NULL;
        run([&](Api &a, int k) { a.quantize_scale(y.t[k], x.t[k]); a.quantize_codes(y.t[k], x.t[k]); }); same("y", y); fin(); }
}
static T3 floats(int n, float v = NAN) { T3 x = mk(F, 1, n); for (auto &t : x.t) for (int i = 0; i < n; i++) ((float *)t.data)[i] = v; return x; }
static void t_norm() {
    group_name = "norm"; const int rows[] = { 1, 16, 66, 144, 528 }, cols[] = { 16, 48, 1040, 5120 };
    for (int N : rows) for (int C : cols) for (auto fs : { F, H }) for (auto kind : { RMS_NORM, LAYER_NORM }) for (DType d : { E4M3, E5M2 }) for (int out = 0; out < 6; out++) for (int exact = 0; exact < 2; exact++) {
        if (((long)N * C > 160000 && (kind == LAYER_NORM || fs.dtype == F32 || d == E5M2 || out == 1 || out == 4)) || (long)N * C > 700000) continue;
        if (getenv("RC") && (kind != RMS_NORM || !exact || (out != 3 && out != 5))) continue;
        if (skip() || (out > 0 && N % 16)) continue; const bool kept = out == 3 || out == 4 || out == 5; float range = out == 5 ? 0.1f : kept ? 5.0f : -1;
        SAY("N %d C %d fs %d kind %d d %d out %d exact %d", N, C, fs.dtype, kind, d, out, exact);
        const Norm norm = { kind, 1e-5f };
        T3 s = filled(fs, N, C, 0), w = filled(N % 2 ? F : H, 1, C, 0), x = mk({ d, 16 }, N, C), st = floats(2 * N), res = out == 0 ? filled(fs, N, C, 0) : T3{};
        T3 y = out == 0 ? mk(H, N, C) : mk({ d, 0 }, N, C, out == 2 || out == 4, range);
        run([&](Api &a, int k) { a.operand_ranges(kept ? RANGES_KEPT : RANGES_MEASURED); (exact ? a.norm_forward_exact : a.norm_forward)(y.t[k], x.t[k], (float *)st.t[k].data, s.t[k], w.t[k], res.t[k], norm); });
        same("x", x); same("stats", st, 1e-5); same("y", y, 0.01);
        for (int k = 1; k < 3; k++) { memcpy(st.t[k].data, st.t[0].data, 8 * N); }
        if (out && out != 5) { /* y again, from equal stats */
            for (int form = 0; form < 3; form++) { T3 z = mk({ d, 0 }, N, C, form != 0); if (form == 2) for (auto &t : z.t) t.data = NULL; for (int k = 0; k < 3; k++) *(float *)z.t[k].scale = *(float *)y.t[0].scale;
                run([&](Api &a, int k) { a.norm_again(z.t[k], x.t[k], (float *)st.t[k].data, w.t[k]); }); char n[20]; sprintf(n, "again%d", form); same(n, z); } }
        else if (out == 0) { T3 dy = filled(fs, N, C, 0), dx = filled(H, N, C, 0), dw = mk(exact ? F : H, 1, C), am = floats(1); for (auto &t : dw.t) t.empty = true;
            run([&](Api &a, int k) { a.norm_backward(dx.t[k], (float *)am.t[k].data, dw.t[k], dy.t[k], x.t[k], (float *)st.t[k].data, w.t[k], norm, true); });
            same("dx", dx, 0.01); same("dw", dw, 0.01); same("amax", am, 0.01);
            for (auto &t : dw.t) t.empty = false; if (N % 16 == 0) { T3 d8 = mk({ d, 0 }, N, C, true); run([&](Api &a, int k) { a.operand_ranges(RANGES_MEASURED); a.norm_backward(d8.t[k], NULL, dw.t[k], dy.t[k], x.t[k], (float *)st.t[k].data, w.t[k], norm, false); }); same("d8", d8, 0.01); same("dw2", dw, 0.01); } }
        fin(); }
}
static LowProduct product(T3 &low, T3 &w, int k, bool is_b, int P, const int (*part)[2]) { LowProduct p = {}; p.low = low.t[k]; p.m.w = w.t[k]; p.m.is_b = is_b; p.m.num_parts = P; for (int i = 0; i < P; i++) p.m.part[i] = { part[i][0], part[i][1] }; return p; }
static void t_rope() {
    group_name = "rope"; struct S { int B, T, H, K, D; } shapes[] = { { 1, 1, 1, 1, 16 }, { 1, 1, 1, 1, 64 }, { 2, 33, 3, 1, 64 }, { 1, 16, 2, 2, 128 }, { 1, 264, 2, 1, 64 }, { 2, 8, 5, 5, 32 }, { 1, 66, 1, 1, 192 }, { 1, 17, 12, 4, 64 }, { 1, 16, 3, 1, 48 }, { 1, 16, 1, 1, 96 }, { 3, 7, 5, 1, 96 }, { 1, 37, 40, 8, 32 }, { 1, 5, 6, 3, 160 } };
    for (auto s : shapes) for (int exact = 0; exact < 2; exact++) for (int place = 0; place < 2; place++) for (int lowr = 0; lowr < 6; lowr++) for (DType d : { E4M3, E5M2 }) for (int clip = 0; clip < 2; clip++) {
        const int N = s.B * s.T, S_ = (s.H + 2 * s.K) * s.D; if (place && !exact && !lowr) continue; if (clip && lowr > 1) continue; if (getenv("R0") && (lowr || !exact)) continue;
        const int ranks[] = { 0, 4, 16, 3, 64, 130 }, r = ranks[lowr]; if (r > 16 && N > 70) continue;
        SAY("B %d T %d H %d K %d D %d exact %d in place %d rank %d d %d clip %d", s.B, s.T, s.H, s.K, s.D, exact, place, r, d, clip);
        T3 table = mk(F, s.T, s.D); for (int i = 0; i < s.T; i++) for (int j = 0; j < s.D / 2; j++) for (auto &t : table.t) { ((float *)t.data)[i * s.D + 2 * j] = cosf(i * 0.3f + j); ((float *)t.data)[i * s.D + 2 * j + 1] = sinf(i * 0.3f + j); }
        T3 x = filled(H, N, S_, r ? 3 : 0), saved = mk({ d, 16 }, N, S_), y = place ? x : mk(H, N, S_);
        const int part[3][2] = { { 0, s.H * s.D }, { s.H * s.D, s.K * s.D }, { (s.H + s.K) * s.D, s.K * s.D } }; const int two[2][2] = { { 0, s.H * s.D }, { (s.H + s.K) * s.D, s.K * s.D } };
        const bool all = lowr % 2; const int P = all ? 3 : 2, rows = all ? S_ : (s.H + s.K) * s.D; T3 low, w; if (r) { low = filled(H, N, P * r, 3); w = filled(H, rows, r, 3); }
        Attention a = {}; a.B = s.B; a.T = s.T; a.H = s.H; a.K = s.K; a.D = s.D; a.clip = clip ? 1.5f : 0;
        run([&](Api &f, int k) { Attention b = a; b.rope = (float *)table.t[k].data; LowProduct p = {}; if (r) p = product(low, w, k, true, P, all ? part : two); f.operand_ranges(RANGES_MEASURED);
            (exact ? f.rope_forward_exact : f.rope_forward)(y.t[k], saved.t[k], NULL, x.t[k], p, {}, {}, b); });
        if (getenv("HASH") && !r) { uint64_t h = 1; for (size_t i = 0; i < (size_t)N * S_ * 2; i++) h = (h ^ ((uint8_t *)y.t[1].data)[i]) * 1099511628211ull; printf("HASH %s %lx\n", what, h); }
        same("saved", saved); if (exact || !clip) same("y", y, 0.01);
        if (!lowr && N % 16 == 0) for (int kept = 0; kept < 3; kept++) { T3 dy = filled(H, N, S_, 0), dx = mk({ d, 0 }, N, S_, kept != 1, kept ? kept == 1 ? 3.f : .2f : -1); if (clip) continue;
            run([&](Api &f, int k) { Attention b = a; b.rope = (float *)table.t[k].data; f.operand_ranges(kept ? RANGES_KEPT : RANGES_MEASURED); f.rope_backward(dx.t[k], {}, {}, dy.t[k], saved.t[k], NULL, {}, {}, b); }); same("dx", dx, 0.01); }
        fin(); }
}
static void t_swiglu() {
    group_name = "swiglu";
    for (int N : { 16, 48, 272, 528 }) for (int C : { 16, 48, 80, 272, 1040, 2064 }) for (int exact = 0; exact < 2; exact++) for (int out = 0; out < 5; out++) for (int lowr = 0; lowr < 6; lowr++) for (DType d : { E4M3, E5M2 }) for (auto fw : { H, F }) {
        if ((long)N * C > 50000 && (d == E5M2 || fw.dtype == F32 || lowr > 2)) continue; if ((long)N * C > 300000) continue; if (lowr > 3 && (N > 50 || C > 300)) continue;
        if (skip() || (out == 4 && !exact)) continue; const int ranks[] = { 0, 4, 16, 3, 64, 130 }, r = ranks[lowr]; const bool kept = out == 2 || out == 3; const float range = out == 3 ? 0.1f : out == 2 ? 20.f : -1;
        SAY("N %d F %d exact %d out %d rank %d d %d wide %d", N, C, exact, out, r, d, fw.dtype);
        T3 x = filled(fw, N, 2 * C, r ? 3 : 0), gu = mk({ d, 16 }, N, 2 * C), act = out == 4 ? mk(H, N, C) : mk({ d, 0 }, N, C, out == 1, range);
        const int part[2][2] = { { 0, C }, { C, C } }; const int one[1][2] = { { C, C } }; const bool all = lowr % 2; T3 low, w; const int P = all ? 2 : 1; if (r) { low = filled(H, N, P * r, 3); w = filled(H, P * C, r, 3); }
        run([&](Api &f, int k) { LowProduct p = {}; if (r) p = product(low, w, k, true, P, all ? part : one); f.operand_ranges(kept ? RANGES_KEPT : RANGES_MEASURED);
            (exact ? f.swiglu_forward_exact : f.swiglu_forward)(act.t[k], gu.t[k], x.t[k], p); });
        if (fw.dtype == BF16 || !r || true) same("gate_up", gu); same("act", act, 0.02);
        if (out != 4 && fw.dtype == BF16) for (int wa = 0; wa < 2; wa++) { /* backward from groups */
            T3 da = filled(H, N, C, r ? 3 : 0), dg = mk({ d, 0 }, N, 2 * C, out == 1, out == 2 ? 50.f : range), a2 = mk({ d, 0 }, N, C, out == 1); if (!wa) a2 = T3{}; T3 lo, wl; if (r) lo = filled(H, N, r, 3), wl = filled(H, r, C, 3);
            run([&](Api &f, int k) { LowProduct p = {}; if (r) p = product(lo, wl, k, false, 1, one); f.swiglu_backward(dg.t[k], a2.t[k], da.t[k], p, gu.t[k]); }); same("dgate_up", dg, 0.02); same("act2", a2, 0.02); }
        fin(); }
}
static void t_loss() {
    group_name = "loss";
    for (int N : { 1, 21, 37, 93 }) for (int V : { 37, 91, 96, 128, 1040, 1043 }) for (auto f : { F, H }) for (DType d : { E4M3, E5M2 }) for (int more = 0; more < 2; more++) for (int vocab : { V, V - 5 }) {
        const int R = (N + 15) / 16 * 16 + 16 * more, W = (V + 15) / 16 * 16 + 32 * more; SAY("N %d V %d vocab %d f %d d %d -> (%d, %d)", N, V, vocab, f.dtype, d, R, W);
        T3 x = filled(f, N, V, 0), g = mk({ d, 0 }, R, W), loss = floats(N), z = floats(N); std::vector<int> t(N); for (auto &e : t) e = rng() % 4 ? rng() % vocab : -1; int *tt = (int *)mem(4 * N); memcpy(tt, t.data(), 4 * N);
        run([&](Api &a, int k) { a.cross_entropy_codes(g.t[k], 1.0f / N, x.t[k], (float *)loss.t[k].data, (float *)z.t[k].data, tt, vocab, 1.0f / N, 1e-3f); });
        same("gradient", g, 0.02); same("loss", loss, 1e-5); same("z", z, 1e-5); same("logits", x);
        for (int k = 1; k < 3; k++) { uint8_t *c = (uint8_t *)g.t[k].data; size_t nz = 0; for (int r = 0; r < R; r++) for (int j = 0; j < W; j++) if ((r >= N || j >= vocab) && c[(size_t)r * W + j] & 0x7f) nz++; if (nz) fail("padding", "not 0", nz, 0); }
        run([&](Api &a, int k) { a.cross_entropy(x.t[k], (float *)loss.t[k].data, (float *)z.t[k].data, tt, vocab, 1.0f / N, 1e-3f, true); }); same("in place", x, 0.01); fin(); }
}
static void t_empty() {
    group_name = "empty";
    for (auto f : { F, H }) for (int N : { 1, 5, 66, 600 }) for (int C : { 16, 37, 48, 272 }) for (int r : { 3, 8, 16, 40, 72 }) for (int isb = 0; isb < 2; isb++) for (auto fx : { H, F, Format{ E4M3, 0 } }) { if (fp8(fx) && C % 16) continue;
        if (skip()) continue; if (N == 600 && (r > 16 || C > 50)) continue; SAY("lora_dw N %d C %d r %d b %d f %d x %d", N, C, r, isb, f.dtype, fx.dtype); const int h = C / 16 * 8; const int part[2][2] = { { 0, h ? h : 8 }, { h ? h : 8, C - (h ? h : 8) } };
        const int P = isb ? 2 : 1; T3 low = filled(H, N, P * r, 3), x = filled(fx, N, C, 3), dm = isb ? mk(f, C, r) : mk(f, r, C);
        for (int e = 1; e >= 0; e--) { run([&](Api &a, int k) { LowProduct p = product(low, dm, k, isb, P, part); p.m.w.empty = e; a.lora_dw(p.m, low.t[k], x.t[k]); }); same(e ? "empty" : "added", dm, 1e-5); } fin(); }
    for (auto f : { F, H }) for (int N : { 1, 21, 200 }) for (int C : { 16, 37, 1040 }) { SAY("embedding N %d C %d", N, C); const int V = 91; T3 dw = mk(f, V, C), dy = filled(H, N, C, 0); std::vector<int> t(N); for (auto &e : t) e = rng() % (N < 100 ? V : 7); TokenAt *s = (TokenAt *)mem(N * sizeof *s); cpu.sort_tokens(s, t.data(), N, V);
        for (int e = 1; e >= 0; e--) { run([&](Api &a, int k) { Tensor w = dw.t[k]; w.empty = e; a.embedding_backward(w, s, dy.t[k]); }); same(e ? "empty" : "added", dw); } fin(); }
}
int main(int argc, char **argv) { if (argc > 2) chance = atof(argv[2]);
    setvbuf(stdout, 0, _IOLBF, 0); cpu.load("./libcpu.so"); gpu.load(getenv("LIB") ? getenv("LIB") : "./libemu.so");
    struct { const char *n; void (*f)(); } all[] = { { "quantize", t_quantize }, { "norm", t_norm }, { "rope", t_rope }, { "swiglu", t_swiglu }, { "loss", t_loss }, { "empty", t_empty } };
    for (auto &t : all) if (argc < 2 || !strcmp(argv[1], t.n)) { int b = bad, c = cases; t.f(); printf("%s: %d calls compared, %d bad, %d emulator errors, %ld launches\n", t.n, cases - c, bad - b, *gpu.errors, *gpu.launches); }
    return bad > 0;
}
