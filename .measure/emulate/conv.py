import re,sys,os
root='../../kernels/cuda/'; out='src/kernels/cuda/'
os.makedirs(out,exist_ok=True)
def launches(s):
    pos=0
    while True:
        i=s.find('<<<',pos)
        if i<0: return s
        # comments contain <<<>>>
        if s[i:i+6]=='<<<>>>': pos=i+6; continue
        j=s.index('>>>',i)
        k=i
        while s[k-1].isspace(): k-=1
        if s[k-1]=='>':
            d=0
            while True:
                k-=1
                if s[k]=='>': d+=1
                if s[k]=='<':
                    d-=1
                    if d==0: break
        while s[k-1].isalnum() or s[k-1]=='_': k-=1
        name=s[k:i].strip(); cfg=s[i+3:j]
        p=s.index('(',j); assert s[j+3:p].strip()=='' ; d=0; q=p
        while True:
            if s[q]=='(': d+=1
            if s[q]==')':
                d-=1
                if d==0: break
            q+=1
        args=s[p+1:q]
        short=re.match(r'\w+',name).group(0)
        new='emu::run("%s", emu::cfg(%s), [&] { %s(%s); })'%(short,cfg,name,args)
        s=s[:k]+new+s[q+1:]; pos=k+10
    return s
def body(s,sig,new):
    """replace function body whose signature line begins with sig"""
    i=s.index(sig); b=s.index('{',i+len(sig)); d=0; q=b
    while True:
        if s[q]=='{': d+=1
        if s[q]=='}':
            d-=1
            if d==0: break
        q+=1
    return s[:b]+'{ '+new+' }'+s[q+1:]
for f in sorted(os.listdir(root)):
    if not f.endswith(('.cu','.cuh','.h')): continue
    s=open(root+f).read()
    if f=='cuda.h': s=s.replace('#ifdef __CUDACC__','#ifdef __cplusplus').replace('#ifdef __cplusplus\n#include <cuda_bf16.h>','#ifdef __cplusplus\n#include "emu.h"\n#include <cuda_bf16.h>')
    if f=='vector.cuh':
        a=s.index('#define QUICK('); b=s.index('#undef QUICK'); s=s[:a]+s[b:]
    if f=='rope.cuh': s=body(s,'static inline float clamp(float x, float limit)\n','return x != x ? x : x > limit ? limit : x < -limit ? -limit : x;')
    if f=='lora.cuh': s=body(s,'inline void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)\n','emu_mma(d, a, b0, b1);')
    if f=='lora_dw.cu':
        s=body(s,'void load_row(Row<BF16> &row, const uint8_t *from, bool known)\n','for (int i=0;i<4;i++) row.word[i]=known?((const uint4*)from,((const uint32_t*)from)[i]):0;')
        s=body(s,'void load_row(Row<D> &row, const uint8_t *from, bool known)\n','for (int i=0;i<2;i++) row.word[i]=known?((const uint32_t*)from)[i]:0;')
        s=body(s,'inline void load_turned(uint32_t (&a)[4], const bf16 *to)\n','''const int lane=threadIdx.x%32; uint64_t all[32];
          emu::warp_gather((uint64_t)(uintptr_t)(to + (lane / 16 * 8 + lane % 8) * LOW_STRIDE<JT> + lane / 8 % 2 * 8), all, "ldmatrix");
          for (int m=0;m<4;m++){ uint32_t w=0; for(int h=0;h<2;h++){ const uint16_t *row=(const uint16_t*)(uintptr_t)all[8*m+lane%4*2+h]; w|=(uint32_t)row[lane/4]<<16*h; } a[m]=w; }''')
    if f=='embedding.cu': s=re.sub(r'asm volatile\("prefetch.*\);',';',s)
    s=re.sub(r'extern __shared__ (\w+) (\w+)\[\];',r'\1 *\2 = (\1 *)emu::dyn;',s)
    s=launches(s)
    if not os.path.exists(out+f) or open(out+f).read()!=s: open(out+f,'w').write(s)
