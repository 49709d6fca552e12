import sys, os, itertools, json, time, torch, torch.nn.functional as F
from torch.nn.attention import sdpa_kernel, SDPBackend
import r1fwd as A, r1bwd as AB
from r1fwd import Tile
import r1stats; from r1stats import attention_stats as ref_stats
try: from gossamer.blocksparse._triton.attention_backward import attention_stats
except Exception as e: print(e); attention_stats=ref_stats
dv="cuda"; bf=torch.bfloat16
def lists(lay):
    Z,R,C = lay.shape
    nz = lay.nonzero()
    col = nz[:,2].int().contiguous(); row=(nz[:,0]*R+nz[:,1]).int().contiguous()
    ro = F.pad(lay.sum(-1).flatten().cumsum(0),(1,0)).int(); co=F.pad(lay.sum(-2).flatten().cumsum(0),(1,0)).int()
    order = torch.argsort((nz[:,0]*C+nz[:,2])*R+nz[:,1]).int()
    return ro,col,co,order,row
FWD = {64:[Tile(64,64,2,4),Tile(64,64,3,4),Tile(64,64,2,4,96)], 128:[Tile(64,64,2,4),Tile(64,64,2,4,168),Tile(64,64,3,4)]}
FWD128 = {64:[Tile(64,128,2,4,168),Tile(128,64,2,4,168),Tile(128,64,3,8,128),Tile(128,128,2,8,128),Tile(128,128,2,8)], 128:[Tile(64,128,2,4),Tile(128,128,2,8),Tile(128,64,2,8)]}
BWD = {64:[(Tile(64,64,2,4),Tile(64,64,2,4)),(Tile(64,64,2,4,128),Tile(64,64,2,4,168)),(Tile(64,64,3,4,168),Tile(64,64,3,4,168)),(Tile(64,64,2,4,112),Tile(64,64,2,4,128))],
       128:[(Tile(64,64,2,4),Tile(64,64,2,4)),(Tile(64,64,1,4),Tile(64,64,2,4)),(Tile(64,64,2,4,168),Tile(64,64,2,4))]}
def run_fwd(q,k,v,L,lengths,z,blk,causal,t): return A.launch_attention_fwd(q,k,v,L[0],L[1],lengths,z,blk,causal,q.shape[-1]**-.5,t)
def run_bwd(q,k,v,g,o,lse,L,lengths,z,blk,causal,t,glse=None):
    st = attention_stats(o,g,lse,glse)
    if glse is not None:
        e=float((st-ref_stats(o,g,lse,glse)).nan_to_num(0,0,0).abs().max())
        if e>1e-2: print("stats WRONG",e)
    return AB.launch_attention_bwd(q,k,v,g,st,L,lengths,z,blk,causal,q.shape[-1]**-.5,t)
def dense(q,k,v,lay,blk,causal,lengths):
    G=q.shape[1]//k.shape[1]; k=k.repeat_interleave(G,1); v=v.repeat_interleave(G,1)
    Tq,Tk=q.shape[2],k.shape[2]
    m = lay.repeat_interleave(blk[0],-2).repeat_interleave(blk[1],-1)[...,:Tq,:Tk].expand(q.shape[0],q.shape[1],Tq,Tk)
    i=torch.arange(Tq,device=dv)[:,None]; j=torch.arange(Tk,device=dv)[None]
    if causal: m = m & (j<=i+Tk-Tq)
    if lengths is not None: m = m & (j<lengths[:,None,None,None])
    s=(q@k.transpose(-1,-2))*q.shape[-1]**-.5
    s=s.masked_fill(~m,float("-inf")); lse=s.logsumexp(-1); p=torch.exp(s-lse.masked_fill(lse==float("-inf"),0)[...,None])
    return p@v, lse
def check(only):
    torch.manual_seed(1)
    for D,blk,B,H,Hk,Tq,Tk,causal,ln in [(64,(64,64),2,2,2,512,512,False,False),(128,(64,64),1,2,2,512,512,False,False),(128,(128,64),2,4,2,500,711,True,False),(64,(64,128),1,4,1,700,650,True,True),(72,(128,128),2,2,1,333,901,False,True),(128,(128,128),1,2,2,512,512,False,False)][only:only+1]:
        for dt in (bf,):
            q,k,v,g=(torch.randn(B,h,t,D,device=dv).to(dt) for h,t in ((H,Tq),(Hk,Tk),(Hk,Tk),(H,Tq)))
            if B==2: q=q.transpose(1,2).contiguous().transpose(1,2)
            R,C=-(-Tq//blk[0]),-(-Tk//blk[1]); lay=torch.rand(B,H,R,C,device=dv)<.4; lay[0,0,0]=False; lay[:,:,:,min(2,C-1)]|=(torch.rand(B,H,R,device=dv)<.5)
            L=lists(lay.view(B*H,R,C)); lengths=torch.tensor([Tk-77,130][:B],device=dv,dtype=torch.int32) if ln else None
            qd,kd,vd=(t.double().requires_grad_() for t in (q,k,v)); ref,lr=dense(qd,kd,vd,lay,blk,causal,lengths); gl_=torch.randn(B,H,Tq,device=dv)
            fin=lr.isfinite(); torch.autograd.backward([ref,lr.where(fin,0)],[g.double(),gl_.double()])
            tiles=[t for t in FWD[64 if D<=64 else 128]+FWD128[64 if D<=64 else 128] if blk[0]%t.block_m==0 and blk[1]%t.block_n==0]
            for t in tiles:
                try:
                    o,lse=run_fwd(q,k,v,L,lengths,(H,1),blk,causal,t); torch.cuda.synchronize()
                    e=float((o.double()-ref).abs().max()); el=float((lse-lr).where(fin,torch.zeros((),device=dv)).abs().max()); ok=bool((lse.isfinite()==fin).all())
                    print("fwd",D,blk,causal,ln,t,f"err {e:.1e} lse {el:.1e} inf {ok}","" if e<2e-2 and el<1e-2 and ok else "WRONG",flush=True)
                except Exception as ex: print("fwd",D,blk,t,type(ex).__name__,str(ex)[:300],flush=True)
            o,lse=ref.to(dt).detach(),lr.float().detach()
            for t in BWD[64 if D<=64 else 128]:
                try:
                    gr=run_bwd(q,k,v,g,o.contiguous(),lse.contiguous(),L,lengths,(H,1),blk,causal,t,gl_); torch.cuda.synchronize()
                    es=[float((a.double()-b.grad).norm()/b.grad.norm()) for a,b in zip(gr,(qd,kd,vd))]
                    print("bwd",D,blk,causal,ln,[f"{e:.1e}" for e in es],"" if max(es)<1e-2 else "WRONG",flush=True)
                except Exception as ex: print("bwd",D,blk,t,type(ex).__name__,str(ex)[:300],flush=True)
def graph(f,n=3):
    f(); torch.cuda.synchronize(); g=torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for _ in range(n): f()
    return g,n
def timed(gs,rounds=5):
    ts=[[] for _ in gs]
    for r in range(rounds):
        for i,(g,n) in enumerate(gs):
            x,y=torch.cuda.Event(True),torch.cuda.Event(True); x.record(); g.replay(); y.record(); y.synchronize(); ts[i].append(x.elapsed_time(y)/n)
    return [sorted(t)[rounds//2] for t in ts]
def main():
    T,H=8192,16; out={}
    for D in (64,128):
        torch.manual_seed(0)
        q,k,v,g=(torch.randn(1,H,T,D,device=dv).to(bf) for _ in range(4))
        qr,kr,vr=(t.detach().requires_grad_() for t in (q,k,v))
        def sd():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION): return F.scaled_dot_product_attention(q,k,v)
        def sdb():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION): o=F.scaled_dot_product_attention(qr,kr,vr)
            return torch.autograd.grad(o,(qr,kr,vr),g)
        base=[graph(sd),graph(sdb,1)]
        for b in (64,128):
            for dens in (.5,.1,.25):
                lay=torch.rand(H,T//b,T//b,device=dv)<dens; lay[...,0]=True; real=float(lay.float().mean()); L=lists(lay)
                names,gs=[],[]
                tl=[t for t in FWD[D]+(FWD128[D] if b==128 else [])]
                for t in tl:
                    try: gs.append(graph(lambda: run_fwd(q,k,v,L,None,(0,1),(b,b),False,t))); names.append(("f",t))
                    except Exception as ex: print(t,type(ex).__name__,str(ex)[:200],flush=True)
                o,lse=run_fwd(q,k,v,L,None,(0,1),(b,b),False,tl[0])
                for t in BWD[D]:
                    try: gs.append(graph(lambda: run_bwd(q,k,v,g,o,lse,L,None,(0,1),(b,b),False,t),2)); names.append(("b",t))
                    except Exception as ex: print(t,type(ex).__name__,str(ex)[:200],flush=True)
                st=attention_stats(o,g,lse,None)
                ts=timed(base+gs); f0,fb=ts[:2]
                print(f"D {D} block {b} density {real:.3f}: cudnn fwd {f0:.3f} f+b {fb:.3f}",flush=True)
                bestf=min(x for x,n in zip(ts[2:],names) if n[0]=="f")
                for (kind,t),x in zip(names,ts[2:]):
                    if kind=="f": print(f"   fwd {x:.3f} = {x/(f0*real):.3f}  {t.block_m}x{t.block_n} st{t.stages} w{t.warps} r{t.registers}",flush=True)
                    else: print(f"   bwd {x:.3f}; f+b {(x+bestf)/(fb*real):.3f}  dq st{t[0].stages} r{t[0].registers} dkdv st{t[1].stages} r{t[1].registers}",flush=True)
        del base
def parts():
    """dq and dkdv alone"""
if __name__=="__main__":
    if "compile" in sys.argv: 
        i=int(sys.argv[2]); n=int(sys.argv[3])
        t0=time.time(); jobs=[]
        for D in (64,128):
            for b in (64,128):
                for t in FWD[D]+(FWD128[D] if b==128 else []): jobs.append((D,b,"f",t))
                for t in BWD[D]: jobs.append((D,b,"b",t))
        for D,b,kind,t in jobs[i::n]:
            q,k,v,g=(torch.randn(1,16,8192,D,device=dv).to(bf) for _ in range(4)); lay=torch.rand(16,8192//b,8192//b,device=dv)<.02; L=lists(lay)
            try:
                if kind=="f": run_fwd(q,k,v,L,None,(0,1),(b,b),False,t)
                else: o=q.clone(); run_bwd(q,k,v,g,o,torch.zeros(1,16,8192,device=dv),L,None,(0,1),(b,b),False,t)
                torch.cuda.synchronize()
            except Exception as ex: print(D,b,kind,t,str(ex)[:300],flush=True)
        print(i,"compiled",time.time()-t0,flush=True); check(i); print(i,"checked",time.time()-t0,flush=True)
    else:
        t=time.time(); main(); print("all",time.time()-t)
