/* The buffers of a model, each listed once. These rows define the members of Acts and
 * BackwardScratch (buffers.h), the names of the memory that blocks share (overlay.h), and the lists
 * of what a tile of the MLP (tile.h) and decoding (decode.h) cut.
 *
 * buffers.h explains the letters. Tensors that hold the same values in the same format are the
 * same memory ("= x"). All blocks share the memory of tensors that backward recomputes, or needs
 * only for a moment ("shared"). "own": memory of one block. */
#pragma once

// clang-format off

/* Tensors that block_forward leaves for block_backward, and gradients with the same lifetime.
 * BRANCH: rows of all tokens of a micro-batch; MLP: rows of a tile, if backward recomputes the MLP;
 * HIDDEN: the same, but with experts rows of assignments (kernels/experts.h).
 *
 *  member          tokens     shape            what                                          f32, bf16        coat */
#define BLOCK_TENSORS(X)                                                                                              \
  X(attn_res,       BRANCH) /* (N, C)           residual stream before attention              own              shared */      \
  X(mlp_res,        MLP)    /* (N, C)           residual stream before the MLP                own              = attn_res */  \
  X(attn_x,         BRANCH) /* (N, C)           input of attention's norm; norm_after: the branch's output  = attn_res  e4m3/16 */ \
  X(mlp_x,          MLP)    /* (N, C)           input of the MLP's norm                       = mlp_res        e4m3/16 */     \
  X(attn_branch,    BRANCH) /* (N, C)           norm_after: the branch's output               = attn_x         shared */      \
  X(mlp_branch,     MLP)    /* (N, C)           norm_after: the MLP's output                  = mlp_x          = attn_branch */ \
  X(attn_h,         BRANCH) /* (N, C)           operand of attention's first GEMM             own              e4m3, shared */ \
  X(mlp_h,          MLP)    /* (N, C)           operand of the MLP's first GEMM; experts: not encoded  own     e4m3, shared */ \
  X(qkv_raw,        BRANCH) /* (N, S)           [q|k|v] as the GEMM writes it                 = qkv_saved      = qkv_saved */ \
  X(qkv_saved,      BRANCH) /* (N, S)           q, k and v as saved                           own              bf16 */        \
  X(qkv_rotated,    BRANCH) /* (N, S)           as attention reads it                         = qkv_saved, or shared with QK-norm or clip */ \
  X(attn_out,       BRANCH) /* (N, H*D)         attention output as computed                  = attn_saved     = attn_saved */ \
  X(attn_saved,     BRANCH) /* (N, H*D)         attention output as saved                     own              bf16 */        \
  X(attn_operand,   BRANCH) /* (N, H*D)         attention output as GEMM operand              = attn_saved     e4m3, shared, or = */ \
  X(gate_up_raw,    HIDDEN) /* (N, 2F)          [gate|up] as the GEMM writes it               = gate_up_saved  shared */      \
  X(gate_up_saved,  HIDDEN) /* (N, 2F)          gate and up as saved                          own              e4m3/16 */     \
  X(swiglu_operand, HIDDEN) /* (N, F)           silu(gate)*up, GEMM operand                   own              e4m3, shared */ \
  X(router_logits,  BRANCH) /* (N, E) F32       experts: logits of the router                 own              own */ \
  X(expert_x,       HIDDEN) /* (R, C)           experts: operand of their first GEMM          shared           e4m3, shared */ \
  X(expert_y,       HIDDEN) /* (R, C)           experts: their outputs                        shared           shared */ \
  X(xa_qkv,         BRANCH) /* (N, P rank)      scale x A^T of a linear layer's input x; P projections have an adapter */           \
  X(xa_out,         BRANCH)                                                                                           \
  X(xa_gate_up,     HIDDEN)                                                                                           \
  X(xa_down,        HIDDEN)                                                                                           \
  X(dact,           HIDDEN) /* (N, F)           gradient of SwiGLU's output                   shared           shared */ \
  X(dgate_up,       HIDDEN) /* (N, 2F)          gradient of [gate|up], a GEMM operand         = gate_up_saved  e5m2: see plan_dgate_up */ \
  X(dqkv_op,        BRANCH) /* (N, S)           gradient of [q|k|v], a GEMM operand; = dqkv if both formats are equal */

/*  member          shape                       what */
#define BLOCK_FLOATS(X)                                                                                               \
  X(attn_stats)             /* (N, 2)           mean and rstd of attn_x */                                            \
  X(mlp_stats)              /* (N, 2)           mean and rstd of mlp_x */                                             \
  X(routing)                /* with experts: the arrays of Acts.experts */                                            \
  X(router_stats)           /* (groups, 2E + 2) statistics of the router for its losses; see Stream.router */         \
  X(qk_stats)               /* (N, 2)           rstd of q and k, with QK-norm; (N, H+K) if heads have norms */       \
  X(lse)                    /* (B, H, T)        log-sum-exp of the scores; see attention_forward */                   \
  X(own_lse)                /* (B, H, T)        as lse, for documents that lie in this context rank's part; NULL: no documents */

/* Buffers that backward of a block writes and the next block overwrites. With c > 1 context ranks,
 * the tensors *_heads have whole sequences with this rank's heads; they are wider than S/c if ranks
 * share key heads. */
#define WORK_TENSORS(X)                                                                                               \
  X(dres)                   /* (N, C)           gradient of the residual stream */                                    \
  X(dy)                     /* (N, C)           gradient of a branch's last GEMM; = dres if no norm or cast lies between */ \
  X(dh)                     /* (N, C)           gradient of a branch's first operand */                               \
  X(datt)                   /* (N, H*D)         gradient of attention's output */                                     \
  X(drouter)                /* (N, E)           experts: gradient of the router's logits */                            \
  X(dweight)                /* (R, 1) F32       experts: gradient of the weights of assignments */                     \
  X(expert_dy)              /* (R, C)           experts: dy of assignments, a GEMM operand */                          \
  X(expert_dx)              /* (R, C)           experts: gradient of expert_x */                                       \
  X(dqkv)                   /* (N, S)           gradient of [q|k|v] */                                                \
  X(dxa)                    /* (N, 3 rank)      gradient of one xa of a block; tensor ranks: (N, 4 rank), of both xa of a branch */ \
  X(own)                    /* (N, C)           tensor ranks: rows to be encoded, in F32 */                           \
  X(partial)                /* (tN, C)          tensor ranks: a layer's partial sum */                                \
  X(exchanged)              /* (c N, S/c)       context ranks: the exchanged rows; they arrive in: */                 \
  X(qkv_heads)              /* (c N, S/c)       qkv_rotated */                                                        \
  X(attn_out_heads)         /* (c N, H*D/c)     attn_out */                                                           \
  X(datt_heads)             /* (c N, H*D/c)     datt */                                                               \
  X(dqkv_heads)             /* (c N, S/c)       dqkv */

/* Buffers of the head, the projector or a single operation: members of Model, Stream and
 * ImageBuffers. */
#define OTHER_TENSORS(X)                                                                                              \
  X(final_h) X(down_folded) X(logits) X(dlogits) X(head_h) X(head_w)                                                  \
  X(image_res) X(image_h) X(image_act) X(image_y)

// clang-format on

typedef enum { ROWS_BRANCH, ROWS_MLP, ROWS_HIDDEN } ActRows;

#define ACT_NAME(name, tokens) ACT_##name,
enum { BLOCK_TENSORS(ACT_NAME) NUM_ACTS };
#undef ACT_NAME
