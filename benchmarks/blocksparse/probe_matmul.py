import sys, os, time, json, itertools, traceback
import torch
from gossamer.blocksparse import Layout
from gossamer.blocksparse._gluon import matmul as G
from gossamer.blocksparse._triton.strips import strips
torch.manual_seed(0); dv=torch.device("cuda"); bf=torch.bfloat16
class BS:
    def __init__(s, v, l): s.v, s.l = v, l
def sparse(z, r, c, b, dens, dt=bf):
    m = torch.rand(z, r, c, device=dv) < dens if dens < 1 else torch.ones(z, r, c, dtype=torch.bool, device=dv)
    l = Layout.from_mask(m, b); return BS(torch.randn(l.capacity, b, b, device=dv).to(dt), l)
def dense(x, rows, cols):
    if not isinstance(x, BS): return x
    l=x.l; b=l.block_size; n=int(l.nnz); o=torch.zeros(l.batch*l.rows*l.cols, b[0], b[1], device=dv, dtype=x.v.dtype)
    o[(l.row_indices[:n].long())*l.cols+l.col_indices[:n].long()]=x.v[:n]
    return o.view(l.batch,l.rows,l.cols,*b).transpose(2,3).reshape(l.batch,l.rows*b[0],l.cols*b[1])
def rowlist(x, t):
    if not isinstance(x, BS): return (None,)*4
    l=x.l
    return (l.col_offsets,l.transpose_order,l.row_indices,l.positions) if t else (l.row_offsets,None,l.col_indices,l.positions)
def mm(a,b,out,Z,M,N,K,trans,tile_m,listed,use_strips,b0=64,stages=4,group=16,programs=132,tiles=None):
    """a,b,out in the kernel's roles; returns a closure"""
    block=(b0,)*3
    la=rowlist(a,trans[0]); lo=rowlist(out,trans[2])
    lb=(b.l.row_offsets,b.l.positions) if isinstance(b,BS) else (None,None)
    if not isinstance(out,BS) : pass
    val=lambda x: x.v if isinstance(x,BS) else x
    def run():
        if use_strips: t=strips(lo[0], out.l.capacity, 256//b0)
        else: t=(None, Z*-(-M//tile_m)*-(-N//256))
        G.launch_matmul(val(a),val(b),val(out),la,lb,lo,t,(Z,M,N,K),block,trans,tile_m,listed,programs,stages,group)
    return run
def check(name, a,b,out,Z,M,N,K,trans,**kw):
    try:
        f=mm(a,b,out,Z,M,N,K,trans,**kw); val=out.v if isinstance(out,BS) else out; val.fill_(float("nan")); f(); torch.cuda.synchronize()
        A=dense(a,0,0).float(); B=dense(b,0,0).float()
        if trans[0]: A=A.transpose(1,2)
        if trans[1]: B=B.transpose(1,2)
        R=A@B
        if trans[2]: R=R.transpose(1,2)
        if isinstance(out,BS):
            mask=BS(torch.ones_like(out.v),out.l); got=dense(out,0,0).float(); R=R*dense(mask,0,0).float()
        else: got=out.float()
        e=float((got-R).norm()/R.norm()); print(f"{'ok ' if e<1e-2 else 'BAD'} {name} {e:.1e}", flush=True)
        return e<1e-2
    except Exception as ex: print("EXC", name, type(ex).__name__, str(ex)[:300], flush=True); return False
def combos(part, parts):
    Z,n=2,512; i=0
    for b in (64,128):
        nb=n//b
        for kind in ("SSS","SSD","SDD","DSD","SDS"):   # out, a, b  (S sparse)
            for trans in ((0,0,0),(1,0,0),(0,1,0),(1,1,0),(0,0,1),(1,1,1)):
                trans=tuple(bool(t) for t in trans)
                o_s,a_s,b_s=kind[0]=="S",kind[1]=="S",kind[2]=="S"
                for tile_m,listed,st in ((128,False,False),(b,True,o_s)):
                    if listed and not a_s: listed=False
                    if not a_s and not o_s: continue
                    i+=1
                    if i%parts!=part: continue
                    yield (kind,b,trans,tile_m,listed,st,o_s,a_s,b_s,Z,n,nb)
def correctness(part=0, parts=1):
    good=0; tot=0
    for kind,b,trans,tile_m,listed,st,o_s,a_s,b_s,Z,n,nb in combos(part,parts):
        mk=lambda s: sparse(Z,nb,nb,b,.5) if s else torch.randn(Z,n,n,device=dv).to(bf)
        a,bb,o=mk(a_s),mk(b_s),mk(o_s)
        tot+=1; good+=check(f"{kind} b{b} t{trans} m{tile_m} list{listed} strips{st}",a,bb,o,Z,n,n,n,trans,tile_m=tile_m,listed=listed,use_strips=st,b0=b,programs=7)
    print(f"correct {good}/{tot}", flush=True)
def bench(fs, n=8):
    ts=[[] for _ in fs]
    for f in fs: f()
    torch.cuda.synchronize()
    for _ in range(n):
        for i,f in enumerate(fs):
            x,y=torch.cuda.Event(True),torch.cuda.Event(True); x.record(); f(); y.record(); y.synchronize(); ts[i].append(x.elapsed_time(y))
    return [sorted(t)[len(t)//2] for t in ts]
def timing():
    # layout builder
    for shape in ((16,128,128),(4,128,128),(1,1024,1024),(4,16,16)):
        m=torch.rand(shape,device=dv)<.5; Layout.from_mask(m,64,capacity=m.numel()); s=torch.cuda.Stream()
        g=torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            for _ in range(20): l=Layout.from_mask(m,64,capacity=m.numel())
        t=bench([g.replay],5)[0]; print(f"layout {shape}: {t/20*1e3:.1f} us", flush=True)
    Z=4
    for n in (8192,4096):
        fl=2*Z*n**3; A=torch.randn(Z,n,n,device=dv).to(bf); B=torch.randn(Z,n,n,device=dv).to(bf); O=torch.empty_like(A)
        cub=lambda: torch.matmul(A,B,out=O)
        for b in (64,128):
            nb=n//b; a,bb,o=sparse(Z,nb,nb,b,1),sparse(Z,nb,nb,b,1),sparse(Z,nb,nb,b,1)
            F=(False,)*3; names,fs=["cuBLAS"],[cub]
            def add(nm,*args,**kw):
                try: f=mm(*args,**kw); f(); torch.cuda.synchronize(); names.append(nm); fs.append(f)
                except Exception as ex: print("EXC",nm,str(ex)[:200],flush=True)
            for st,gr in ((4,16),(3,16),(4,8),(3,8)): add(f"SSS 128 st{st} g{gr}",a,bb,o,Z,n,n,n,F,tile_m=128,listed=False,use_strips=False,b0=b,stages=st,group=gr)
            add("SSS strips list",a,bb,o,Z,n,n,n,F,tile_m=b,listed=True,use_strips=True,b0=b,stages=4)
            if b==64: add("SSS strips list st5",a,bb,o,Z,n,n,n,F,tile_m=b,listed=True,use_strips=True,b0=b,stages=5)
            add("SDD strips",A,B,o,Z,n,n,n,F,tile_m=b,listed=False,use_strips=True,b0=b)
            add("SDD 128 grid",A,B,o,Z,n,n,n,F,tile_m=128,listed=False,use_strips=False,b0=b)
            add("DSD list",a,B,O,Z,n,n,n,F,tile_m=b,listed=True,use_strips=False,b0=b)
            add("DSD 128 all",a,B,O,Z,n,n,n,F,tile_m=128,listed=False,use_strips=False,b0=b)
            ts=bench(fs,5 if n==8192 else 9)
            for nm,t in zip(names,ts): print(f"n{n} b{b} full  {nm:22s} {t:.3f} ms {fl/t/1e9:.0f} TF  {ts[0]/t:.2f}", flush=True)
            for spars in (.02,.25,.5,.75):
                ins=.02 if spars==.02 else .25
                a2,b2,o2=sparse(Z,nb,nb,b,1-ins),sparse(Z,nb,nb,b,1-ins),sparse(Z,nb,nb,b,1-spars); names,fs=["cuBLAS"],[cub]
                add("SSS 128 all",a2,b2,o2,Z,n,n,n,F,tile_m=128,listed=False,use_strips=False,b0=b)
                add("SSS strips list",a2,b2,o2,Z,n,n,n,F,tile_m=b,listed=True,use_strips=True,b0=b)
                add("SDD strips",A,B,o2,Z,n,n,n,F,tile_m=b,listed=False,use_strips=True,b0=b)
                add("DSD list",o2,B,O,Z,n,n,n,F,tile_m=b,listed=True,use_strips=False,b0=b)
                ts=bench(fs,5)
                for nm,t in zip(names[1:],ts[1:]): print(f"n{n} b{b} out {1-spars:.2f} in {1-ins:.2f} {nm:18s} {t:.3f} ms  x cuBLAS*density {t/ts[0]/(1-spars):.2f}", flush=True)
            del a,bb,o
if __name__=="__main__":
    if sys.argv[1]=="check": correctness(int(sys.argv[2]),int(sys.argv[3]))
    elif sys.argv[1]=="time": timing()
